"""Rows that a loop goes over more than once are held in registers: Inductor's persistent reductions, of longer rows.

Example: a residual, its norm and a cast to 8 bits, each row with a scale of its own, are one loop. It goes over a row
for the sum of squares, for the largest number and for what it writes. Up to 1024 columns Inductor holds the row
meanwhile; longer ones it reads again. (H200, bench/results/held.jsonl, 16384 rows of bf16: that loop takes 111 us for
2048 columns, 64 with the row held; LayerNorm with a residual 133 and 81 for 2560 columns, its gradient 77 and 53 for
1536. Of 25 such loops of at most 8192 columns, with no more lanes than before, none takes longer.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import sympy
from torch import fx
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

log = logging.getLogger("coda_inductor.held")

TAKEN = 2048
"""The columns that Inductor's loops take at a time, at most."""


def rows_held(compile_graph: Callable[..., Any], longest: int) -> Callable[..., Any]:
    """Inductor's compile_fx_inner, but of loops that hold rows of up to `longest` columns; itself if that is 0. A
    backward is compiled later than its forward, and in another thread, so its choices are made there."""
    if not longest:
        return compile_graph

    @functools.wraps(compile_graph)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(holding(V.choices, longest)):
            return compile_graph(*args, **kwargs)

    return compiled


class Holding(CustomGraphPass):
    """Changes nothing. By it Inductor's caches tell graphs whose rows are held from others."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, graph: fx.Graph) -> None:
        """Nothing to do."""

    def uuid(self) -> Any:
        """What such a graph depends on, beside what Inductor knows."""
        return __name__, self.longest


def holding(theirs: InductorChoices, longest: int) -> InductorChoices:
    """Inductor's choices, or the user's own, but for the longer rows that are held."""
    kind: Any = type(theirs)

    class Choices(kind):  # type: ignore[misc]
        """What it does not say is `theirs`."""

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if theirs.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            return not cooperative_reduction and holds(features, longest)

    made: InductorChoices = object.__new__(Choices)
    vars(made).update(vars(theirs))
    return made


def holds(features: Any, longest: int) -> bool:
    """Is a kernel (Inductor's SIMDKernelFeatures) a loop that goes over rows more than once, and worth holding them?"""
    columns = features.reduction_numel
    if not isinstance(columns, int | sympy.Integer) or not fits(int(columns), longest):
        return False
    nodes = features.scheduler_nodes()
    numbers = [sympy_product(size for sizes in node.get_ranges() for size in sizes) for node in nodes]
    if numbers.count(features.numel * columns) < 2 or not all(map(along_rows, nodes)):
        return False
    log.debug("a loop over rows of %s columns holds them in registers", columns)
    return True


def fits(columns: int, longest: int) -> bool:
    """Are there registers for a row, and no more lanes to it than a loop would take? (A row has as many as the next
    power of two. Rows of 5120 columns, which have 8192 and loops 6144: LayerNorm with a residual takes 81 us for 94,
    the loop of three walks 125 for 115.)"""
    lanes = 1 << (columns - 1).bit_length()
    return lanes <= min(longest, -(-columns // TAKEN) * TAKEN)


def along_rows(node: Any) -> bool:
    """Does all that an operation of a loop reads and writes lie along its rows, one number beside the next?"""
    deps = [dep for dep in node.read_writes.reads | node.read_writes.writes if isinstance(dep, MemoryDep)]
    return all(dep.is_contiguous() or dep.stride1_for_last_dim() for dep in deps)
