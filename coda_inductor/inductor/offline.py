"""The rewriting that a machine with the target would make, on any machine: what is legal there is arithmetic.

Nothing is measured, so every Region that is legal stays; torch.compile keeps those that win.
"""

from __future__ import annotations

from torch import fx

from coda_inductor.codegen import legality
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint import Report, rewrite
from coda_inductor.inductor.joint_pass import require_graph
from coda_inductor.inductor.judges import NO_CONTEST, Decide, Judges
from coda_inductor.patterns.graph import MATRIX_PRODUCTS


def target_of(settings: Settings) -> str:
    """The target that is spoken of: without a choice, the one that kernels are made for."""
    return "sm_90a" if settings.target == "auto" else settings.target


def rewrite_for(graph: fx.Graph, settings: Settings, decide: Decide = NO_CONTEST) -> Report:
    """Rewrites the graph in place for `target_of(settings)`. Raises Unsupported as `rewrite` and `require_graph` do."""
    if not any(node.target in MATRIX_PRODUCTS for node in graph.nodes):
        raise Unsupported("it has no matrix product")
    if settings.target == "reference":
        return rewrite(graph, settings, judges=Judges(decide=decide))
    require_graph(graph)
    return rewrite(graph, settings, target_of(settings), Judges(legality.check, decide))
