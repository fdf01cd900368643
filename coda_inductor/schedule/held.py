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
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from coda_inductor.core.errors import warn
from coda_inductor.kernels.record import sources_digest

log = logging.getLogger("coda_inductor.held")

SHORTEST = 1025
"""The columns of the shortest rows for which it is decided here. Shorter ones Inductor holds by itself."""
TAKEN = 2048
"""The columns that Inductor's loops take at a time, as a rule."""
ROOM = 32768
"""32-bit numbers of a row, in lanes times tensors: what was timed has 4 tensors of 8192 columns, or 7 of 2048."""
PART = 64
"""Numbers of a row that lie one beside the next at least: a head's, say."""
PERSISTENT = "override_persistent_reduction"  # TritonKernel's argument


def rows_held(compile_graph: Callable[..., Any], longest: int) -> Callable[..., Any]:
    """Inductor's compile_fx_inner, but of loops that hold rows of up to `longest` columns; itself if that is 0. A
    backward is compiled later than its forward, and in another thread, so its choices are made there."""
    if not longest:
        return compile_graph

    @functools.wraps(compile_graph)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(Choices(V.choices, longest)):
            return compile_graph(*args, **kwargs)

    return compiled


class CacheMark(CustomGraphPass):
    """Changes nothing. By it Inductor's caches tell graphs whose rows are held from others."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, graph: fx.Graph) -> None:
        """Nothing to do."""

    def uuid(self) -> Any:
        """What such a graph depends on, beside what Inductor knows."""
        return __name__, self.longest, sources_digest()


class Choices:
    """Inductor's choices (InductorChoices), or the user's own, but for the longer rows that are held."""

    def __init__(self, theirs: Any, longest: int) -> None:
        self.theirs, self.longest = theirs, longest

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.theirs, name)

    def triton_kernel_kwargs(self, kind: Any, features: Any, tilings: Any, given: dict[str, Any]) -> dict[str, Any]:
        """What Inductor makes a kernel with."""
        found: dict[str, Any] = self.theirs.triton_kernel_kwargs(kind, features, tilings, given)
        try:
            hold = PERSISTENT not in found and holds(features, tilings, self.longest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # another torch, with other names
            warn(f"a loop does not hold its rows: {type(error).__name__}: {error}")
            hold = False
        return {**found, PERSISTENT: True} if hold else found


def holds(features: Any, tilings: Sequence[dict[str, Any]], longest: int) -> bool:
    """Is a kernel (Inductor's SIMDKernelFeatures and its tiling) a loop whose rows are worth holding?"""
    triton, (tiling,), columns = inductor_config.triton, tilings, features.reduction_numel
    if not triton.persistent_reductions or triton.multi_kernel or triton.cooperative_reductions:
        return False
    if {*tiling} != {"x", "r0_"} or not isinstance(columns, int | sympy.Integer) or not fits(int(columns), longest):
        return False
    nodes, numbers = features.scheduler_nodes(), features.numel * columns
    if features.contains_op("scan") or features.contains_op("sort") or not goes_again(nodes, numbers):
        return False
    if not all(map(along_rows, nodes)) or tensors(nodes, numbers) * lanes(int(columns)) > ROOM:
        return False
    log.debug("a loop over rows of %s columns holds them in registers", columns)
    return True


def fits(columns: int, longest: int) -> bool:
    """Has a row no more lanes than a loop would take? (Rows of 5120 columns have 8192, and loops 6144: LayerNorm with a
    residual takes 81 us for 94, the loop of three walks 125 for 115.)"""
    return columns >= SHORTEST and lanes(columns) <= min(longest, -(-columns // TAKEN) * TAKEN)


def lanes(columns: int) -> int:
    """Of a row that is held: the next power of two."""
    return 1 << (columns - 1).bit_length()


def goes_again(nodes: Sequence[Any], numbers: Any) -> bool:
    """Does an operation go over all numbers that waits for what another sums, or takes the largest of, over a row?"""
    late = set[str]()
    for node in nodes:
        waits = not late.isdisjoint(dep.name for dep in node.read_writes.reads)
        if waits and over_all(node, numbers):
            return True
        if waits or node.is_reduction():
            late |= {out.get_name() for out in node.get_outputs()}
    return False


def over_all(node: Any, numbers: Any) -> bool:
    """Does the operation go over all numbers of the rows?"""
    return bool(sympy_product(size for sizes in node.get_ranges() for size in sizes) == numbers)


def along_rows(node: Any) -> bool:
    """Does all that an operation of a loop reads and writes lie along its rows, or is the same for a whole row? A row
    may lie in parts, as heads do. No for a flipped row, one of columns, or one that is picked."""
    deps = node.read_writes.reads | node.read_writes.writes
    return all(isinstance(dep, MemoryDep) and not dep.is_indirect() and _lies_along(dep) for dep in deps)


def _lies_along(dep: MemoryDep) -> bool:
    last = dep.var_names[-1] if dep.var_names else None
    if last not in dep.index.free_symbols:
        return True
    return bool(_place(dep, last, PART - 1) - _place(dep, last, 0) == PART - 1)


def _place(dep: MemoryDep, last: sympy.Symbol, i: int) -> Any:
    """Where number i of the first row lies."""
    return dep.index.subs(dict.fromkeys(dep.var_names, 0) | {last: i})


def tensors(nodes: Sequence[Any], numbers: Any) -> int:
    """How many tensors of all numbers, or parts of one, the loop reads and writes; those of 64 bits count twice."""
    deps = (dep for node in nodes for dep in node.read_writes.reads | node.read_writes.writes)
    whole = {(dep.name, _place(dep, dep.var_names[-1], 0)) for dep in deps if dep.get_numel() == numbers}
    return sum(max(1, V.graph.get_dtype(name).itemsize // 4) for name, _ in whole)
