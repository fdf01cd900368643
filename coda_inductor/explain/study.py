"""What one rewriting of a model tells: the facts of `explain`, those of `graph`, and the Regions themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.facts import Account, rows_of
from coda_inductor.explain.modules import Modules
from coda_inductor.explain.offline import rewritten
from coda_inductor.explain.rewriting import Rewriting
from coda_inductor.explain.steps import Listing, listed
from coda_inductor.inductor.records import Site

Facts = dict[str, Any]


@dataclass(slots=True)
class Study:
    """`explained` are the facts of explain; `programs` and `sites` have an entry for each of its graphs: the facts of
    graph, and the Regions with their rows at the traced sizes."""

    explained: Facts = field(default_factory=dict)
    programs: list[Facts] = field(default_factory=list)
    sites: list[list[tuple[Site, int]]] = field(default_factory=list)


def study(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Settings,
) -> Study:
    """Every graph of model(*args, **kwargs), rewritten for `target_of(settings)`. Needs no GPU, and runs nothing."""
    found, account = Study(), Account(settings)

    def on_graph(graph: fx.Graph) -> None:
        modules, before, rewriting = Modules.of(graph), Listing(graph).steps(), Rewriting()
        account.add(graph, rewriting)
        found.programs.append(listed(graph, before, rewriting, modules))
        nodes = {n.name: n for n in rewritten(graph).nodes}
        made = rewriting.report.sites if rewriting.report else ()
        found.sites.append([(site, rows_of(site, nodes)) for site in made])

    capture(model, args, kwargs, mode, on_graph, settings)
    found.explained = account.facts(mode)
    return found
