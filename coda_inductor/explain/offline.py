"""The rewriting that a machine with the target would make, on any machine: what is legal there is arithmetic.

Nothing is measured, so every Region that is legal stays, and whose sizes are known; torch.compile keeps those that win.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from coda_inductor.codegen import legality, target
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint import WITHOUT_PRODUCTS, rewrite
from coda_inductor.inductor.joint_pass import require_graph, require_options, within
from coda_inductor.inductor.records import Report
from coda_inductor.patterns.graph import MATRIX_PRODUCTS
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.group import without_sizes
from coda_inductor.tuning.verdicts import UNTUNED, Decide, Decisions

FAST_PATHS = frozenset({
    torch.ops.aten._transformer_encoder_layer_fwd.default,
    torch.ops.aten._native_multi_head_attention.default,
})  # fmt: skip
"""What torch calls in inference for a whole layer of nn.TransformerEncoder."""


def target_of(settings: Settings) -> str:
    """The target that is spoken of: without a choice, the one that was tested."""
    return target.SM_90A.name if settings.target == "auto" else settings.target


def rewritten(graph: fx.Graph) -> fx.Graph:
    """What has become of a graph that was rewritten: its module may have another."""
    return graph if graph.owning_module is None else graph.owning_module.graph


def rewrite_for(graph: fx.Graph, settings: Settings, decide: Decide = UNTUNED) -> Report:
    """Rewrites the graph (see `rewritten`) for `target_of(settings)`. Raises Unsupported as `rewrite` does, and where
    a compile leaves the graph to Inductor."""
    if not any(node.target in MATRIX_PRODUCTS for node in graph.nodes):
        if any(node.target in FAST_PATHS for node in graph.nodes):
            hint = "torch.backends.mha.set_fastpath_enabled(False) opens them"
            raise Unsupported("its products are inside of torch's fast path for nn.TransformerEncoder", hint=hint)
        require_options(settings)
        row = target.TARGETS.get(target_of(settings))
        done = rewrite(graph, within(settings, row) if row else settings, target_of(settings), stages=WITHOUT_PRODUCTS)
        if done.elementwise:
            return done
        integers = any(node.target is torch.ops.aten._int_mm.default for node in graph.nodes)
        raise Unsupported("it has no matrix product" + " but of integers (aten._int_mm)" * integers)
    require_options(settings)
    if settings.target == "reference":
        return rewrite(graph, settings, decisions=Decisions(decide=decide))
    require_graph(graph)

    def measurable(plan: Plan, builts: list[Built]) -> Limits:
        unknown = without_sizes(plan, builts)
        return Limits(unknown) if unknown else decide(plan, builts)

    row = target.of_name(target_of(settings))
    decisions = Decisions(partial(legality.check, target=row), measurable)
    return rewrite(graph, within(settings, row), row.name, decisions)
