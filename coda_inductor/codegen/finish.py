"""The kernel after one that takes sums: of what each tile left it makes one result, on the same stream.

A sum leaves a kernel as partial results [tiles, length], f32: over N one for each row and tile of columns (length is
M), over M one for each column and tile of rows (length is N). They are added in an order that depends on nothing but
how many tiles there are, so that equal inputs give equal results. Imported by generated modules (through device.py), so
it imports the compiler; its content is part of their names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

LANES, WARPS = 32, 16  # a block's: entries, and parts into which its tiles are split
AHEAD = 4  # partial results that a thread asks for at once: none waits for the one before


class Total(NamedTuple):
    """One reduction: the field of its partial results, the field of the result, is it over M, its row's name, and how
    many columns of partial results over M lie beside one another for each of the result's: the first counts. `rounded`:
    the dtype of 16 bits, by the compiler's name, to which the result is rounded; "": none. `tokens`: the result has an
    entry for each column of each sample of so many, which whole tiles of rows make up."""

    parts: str
    whole: str
    over_m: bool
    of: str
    lanes: int = 1
    rounded: str = ""
    tokens: int = 0


def finish(totals: Sequence[Total], args: Any, stream: Any) -> None:
    """Launches what finishes the `totals`, whose fields `args` has: one kernel for those over N, one for those over M,
    one for those over the rows of each sample of as many tokens, since these are of one length. Traced into the host
    function of the kernel that they follow."""
    for over_m, tokens in sorted({(total.over_m, total.tokens) for total in totals}):
        some = [total for total in totals if (total.over_m, total.tokens) == (over_m, tokens)]
        parts = [getattr(args, total.parts) for total in some]
        if not over_m:  # [length, tiles]
            parts = [cute.make_tensor(p.iterator, cute.select(p.layout, mode=[1, 0])) for p in parts]
        parts = [_first_lanes(p, total.lanes) if over_m else p for p, total in zip(parts, some, strict=True)]
        wholes = [getattr(args, total.whole) for total in some]
        parts = [_by_samples(p, w) if tokens else p for p, w in zip(parts, wholes, strict=True)]
        kinds = [(total.of, total.rounded) for total in some]
        finish_sums(parts, wholes, kinds, cute.size(wholes[0]), stream)


def _first_lanes(parts: Any, lanes: int) -> Any:
    """[tiles, length] of [tiles, length * lanes]."""
    (tiles, length), (pitch, step) = parts.shape, parts.stride
    layout = cute.make_layout((tiles, length // lanes), stride=(pitch, step * lanes))
    return cute.make_tensor(parts.iterator, layout)


def _by_samples(parts: Any, whole: Any) -> Any:
    """[tiles of a sample, (length, samples)] of [tiles, length]."""
    (tiles, length), (pitch, step) = parts.shape, parts.stride
    samples = cute.size(whole) // length
    each = tiles // samples
    layout = cute.make_layout((each, (length, samples)), stride=(pitch, (step, each * pitch)))
    return cute.make_tensor(parts.iterator, layout)


def finish_sums(parts: list[Any], wholes: list[Any], kinds: list[tuple[str, str]], length: Any, stream: Any) -> None:
    """Launches one kernel for sums of `length` entries each."""
    blocks = (length + (LANES - 1)) // LANES
    _finish(parts, wholes, kinds).launch(
        grid=(blocks, len(parts), 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel  # type: ignore[untyped-decorator]
def _finish(parts: list, wholes: list, kinds: cutlass.Constexpr):  # type: ignore[no-untyped-def, type-arg]
    """parts: [tiles, length] each, wholes: [length] each; a block is LANES entries of one of them."""
    block, which, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % LANES, thread // LANES
    entry = block * LANES + lane
    shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout((LANES, WARPS)), 16)
    # What comes next may be set up meanwhile; it waits in turn, or reads nothing of this (device._Overlapping).
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range_constexpr(len(parts)):
        of, rounded = kinds[i]
        if which == i:
            whole = FINISHING[of](parts[i], shared, entry, lane, warp)
            if warp == 0 and entry < cute.size(parts[i], mode=[1]):
                wholes[i][entry] = _as_stored(whole, rounded)


def _as_stored(x: Any, dtype: str) -> Any:
    """The number as one of 16 bits holds it. Rounding keeps the order of numbers, so that of the largest it is the
    largest of the rounded."""
    return x.to(getattr(cutlass, dtype)).to(Float32) if dtype else x


@cute.jit
def _sum(parts, shared, entry, lane, warp):  # type: ignore[no-untyped-def]
    tiles, length = parts.shape[0], cute.size(parts, mode=[1])
    total = Float32(0.0)
    if entry < length:
        for first in cutlass.range(warp, tiles, WARPS * AHEAD):
            for value in _some(parts, first, entry, Float32(0.0)):
                total += value
    return _of_all_warps(total, shared, lane, warp)


@cute.jit
def _normaliser(parts, shared, entry, lane, warp):  # type: ignore[no-untyped-def]
    """log sum exp, as torch takes it: relative to the largest, unless that is infinite."""
    tiles, length = parts.shape
    largest = _largest(parts, shared, entry, lane, warp)
    cute.arch.sync_threads()
    finite = largest - largest == Float32(0.0)
    shift = cutlass.select_(finite, largest, Float32(0.0))
    total = Float32(0.0)
    if entry < length:
        for first in cutlass.range(warp, tiles, WARPS * AHEAD):
            for value in _some(parts, first, entry, Float32(-math.inf)):
                total += cute.math.exp(value - shift)
    total = _of_all_warps(total, shared, lane, warp)
    return cute.math.log(total) + shift


def larger(a: Any, b: Any) -> Any:
    """NaN if one of them is, as in torch.amax."""
    return cute.arch.fmax(a, b, nan=True)


def _some(parts: Any, first: Any, entry: Any, otherwise: Any) -> list[Any]:
    """The next of a warp's partial results, from the tile `first` on; `otherwise` past the last."""
    tiles = [first + WARPS * i for i in range(AHEAD)]
    inside = [tile < parts.shape[0] for tile in tiles]
    found = [parts[cutlass.select_(i, tile, first), entry] for i, tile in zip(inside, tiles, strict=True)]
    return [cutlass.select_(i, value, otherwise) for i, value in zip(inside, found, strict=True)]


@cute.jit
def _largest(parts, shared, entry, lane, warp):  # type: ignore[no-untyped-def]
    """The largest of an entry's partial results, which all warps get; NaN if one of them is."""
    tiles, length = parts.shape
    largest = Float32(-math.inf)
    if entry < length:
        for first in cutlass.range(warp, tiles, WARPS * AHEAD):
            for value in _some(parts, first, entry, Float32(-math.inf)):
                largest = larger(largest, value)
    shared[lane, warp] = largest
    cute.arch.sync_threads()
    for other in cutlass.range_constexpr(WARPS):
        largest = larger(largest, shared[lane, other])
    return largest


@cute.jit
def _of_all_warps(total, shared, lane, warp):  # type: ignore[no-untyped-def]
    """The sum of what the warps hold in a lane."""
    shared[lane, warp] = total
    cute.arch.sync_threads()
    total = Float32(0.0)
    for other in cutlass.range_constexpr(WARPS):
        total += shared[lane, other]
    return total


FINISHING = {"sum": _sum, "max": _largest, "logsumexp": _normaliser}
"""By the rows of core/reductions.py that an epilogue takes."""
