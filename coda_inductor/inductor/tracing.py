"""How a graph is traced before our pass reads it, whether it is compiled or explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from coda_inductor.core.settings import Settings
from coda_inductor.inductor.tangents import as_outputs


def functorch_options(gm: fx.GraphModule, settings: Settings) -> dict[str, Any]:
    """What AOTAutograd and the partitioner are told about Dynamo's graph: how gradients lie that come from outside, and
    under a memory budget that a Region is no operation that costs nothing."""
    counted = functorch_config.activation_memory_budget < 1 or functorch_config.is_non_builtin_to_include
    return {
        "is_non_builtin_to_include": counted,
        "guess_tangent_strides_as_outputs": as_outputs(gm, settings),
    }


def passes(chained: Any) -> tuple[Callable[[fx.Graph], object], ...]:
    """The passes that somebody put where one of ours goes: one, several or none."""
    return tuple(chained) if isinstance(chained, list | tuple) else (chained,) if chained is not None else ()


def uuids(passes: Sequence[object]) -> tuple[object, ...] | None:
    """What identifies them for Inductor's caches; None if one cannot be."""
    found = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in passes)
    return found if all(found) else None
