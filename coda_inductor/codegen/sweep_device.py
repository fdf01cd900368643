"""The kernel of a Sweep: each warp walks down a strip of columns, and no row is waited for.

A strip is 32 threads, each of which has VECTOR neighbouring columns (in a part of halves, pairs) for as long as the
kernel runs: what it sums over M stays in its registers, and what it sums over N is added up within the warp and left as
a partial result for each row and strip. finish.py adds those up. A block's warps share a strip.

On an H200 it runs at 2.8 to 3.75 TB/s for GPT-2 XL and Llama-3-8B (bench/results/sweeps.jsonl). Of its prototype two or
four rows at a time and four or eight warps, with as many or twice as many blocks, were within 8 % of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from coda_inductor.codegen.finish import finish_sums
from coda_inductor.codegen.legality import VECTOR
from coda_inductor.codegen.sweep_plan import ROWS, STRIP, THREADS, WARPS, slots, strips, tiles
from coda_inductor.core.sweep import Part, Read, Sweep, Write

TYPES = {"bf16": BFloat16, "f16": Float16, "f32": Float32}


class SweepKernel:
    """The host function that is compiled, of one Sweep and the functions of its module."""

    def __init__(self, sweep: Sweep, functions: Sequence[Callable[..., tuple[Any, ...]]]) -> None:
        self.sweep, self.functions = sweep, functions

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(self, inputs: list, outs: list, scratch, blocks: Int32, stream):  # type: ignore[no-untyped-def, type-arg]
        """inputs: as the Sweep's; outs: as its outputs; scratch: f32, for all partial results; blocks: to a strip."""
        partials, stored, sums = self.partials(self.sweep.tokens(inputs[0].shape), scratch, blocks), [], []
        for output, out in zip(self.sweep.outputs, outs, strict=True):
            stored.append(out if output.extent == "tile" else None)
            sums += [out] if output.extent != "tile" else []
        count = sum(strips(part) for part in self.sweep.parts)
        self.kernel(inputs, stored, partials).launch(
            grid=(count, blocks, 1), block=(THREADS * WARPS, 1, 1), stream=stream
        )
        if cutlass.const_expr(len(sums) > 0):
            longest = Int32(self.sweep.tokens(inputs[0].shape))
            for output in self.sweep.outputs:
                longest = Int32(cutlass.select_(longest > output.width, longest, Int32(output.width)))
            finish_sums(partials, sums, [False] * len(sums), longest, stream)

    def partials(self, m: Any, scratch: Any, blocks: Any) -> list[Any]:
        """Of each sum its partial results, [tiles, length], one behind the other."""
        found, start = [], Int32(0)
        for i, output in enumerate(self.sweep.outputs):
            if output.extent != "tile":
                length = output.width or m
                count = tiles(self.sweep, i, blocks)
                layout = cute.make_layout((count, length), stride=(length, 1))
                found.append(cute.make_tensor(scratch.iterator + start, layout))
                start += count * length
        return found

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(self, inputs: list, stored: list, partials: list):  # type: ignore[no-untyped-def, type-arg]
        strip, block, _ = cute.arch.block_idx()
        shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARPS, STRIP), stride=(STRIP, 1)), 16)
        first = 0
        for i in cutlass.range_constexpr(len(self.sweep.parts)):
            count = strips(self.sweep.parts[i])
            if strip >= first and strip < first + count:
                self.part(i, strip - first, inputs, stored, partials, shared, block)
            first += count

    @cute.jit  # type: ignore[untyped-decorator]
    def part(self, number: cutlass.Constexpr, strip, inputs: list, stored: list, partials: list, shared, block):  # type: ignore[no-untyped-def, type-arg]
        sweep, part, function = self.sweep, self.sweep.parts[number], self.functions[number]
        _, blocks, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % THREADS, thread // THREADS
        chunk = strip * THREADS + lane
        within = chunk < part.n // VECTOR
        column = cutlass.select_(within, chunk, 0) * VECTOR
        m = sweep.tokens(inputs[0].shape)
        features = [_feature(part, r, inputs, column) for r in part.reads]
        over_m = [_zeros() if _extent(sweep, w) == "feature" else None for w in part.writes]
        for row in cutlass.range((block * WARPS + warp) * ROWS, m, blocks * (WARPS * ROWS)):
            read = [_load(sweep, part, inputs, cutlass.select_(row + j < m, row + j, row), column) for j in range(ROWS)]
            for j in cutlass.range_constexpr(ROWS):
                inside = within & (row + j < m)
                made = _values(part, function, read[j], features)
                _add_up(over_m, made, inside)
                if inside:
                    _store(sweep, part, made, stored, row + j, column)
                sums = _over_n(sweep, part, made, inside)
                if lane == 0 and row + j < m:
                    _leave_rows(sweep, number, sums, partials, strip, row + j)
        for i in cutlass.range_constexpr(len(part.writes)):
            if cutlass.const_expr(over_m[i] is not None):
                partial = partials[_sum(sweep, part.writes[i].output)]
                _leave_columns(
                    partial, over_m[i], shared, block, _place(part, part.writes[i], column), within, lane, warp
                )


@cute.jit
def _leave_columns(partial, values, shared, block, place, within, lane, warp):  # type: ignore[no-untyped-def]
    """A block's sums over M: of its warps, one after the other."""
    for k in cutlass.range_constexpr(VECTOR):
        shared[warp, k * THREADS + lane] = values[k]
    cute.arch.sync_threads()
    for k in cutlass.range(warp, VECTOR, WARPS):
        total = Float32(0.0)
        for other in cutlass.range_constexpr(WARPS):
            total += shared[other, k * THREADS + lane]
        if within:
            partial[block, place + k] = total
    cute.arch.sync_threads()


def _leave_rows(sweep: Sweep, number: int, sums: dict[int, Any], partials: list[Any], strip: Any, row: Any) -> None:
    """A warp's sums over N of one row."""
    for output, total in sums.items():
        partials[_sum(sweep, output)][slots(sweep, output)[number] + strip, row] = total


def _extent(sweep: Sweep, write: Write) -> str:
    """Of what is written to."""
    return sweep.outputs[write.output].extent


def _sum(sweep: Sweep, output: int) -> int:
    """Which of the sums an output is."""
    return sum(o.extent != "tile" for o in sweep.outputs[:output])


def _values(part: Part, function: Callable[..., tuple[Any, ...]], read: list[Any], features: list[Any]) -> list[Any]:
    """Of each write the VECTOR values of one row."""
    found = list[tuple[Any, ...]]()
    for k in range(VECTOR):
        found.append(function(*(x[k] if f is None else f[k] for f, x in zip(features, read, strict=True))))
    return [[Float32(each[i]) for each in found] for i in range(len(part.writes))]


def _over_n(sweep: Sweep, part: Part, made: list[Any], inside: Any) -> dict[int, Any]:
    """The warp's sums of one row, by output."""
    sums = dict[int, Any]()
    for w, values in zip(part.writes, made, strict=True):
        for value in values if _extent(sweep, w) == "token" else ():
            sums[w.output] = sums[w.output] + value if w.output in sums else value
    return {output: _of_the_warp(cutlass.select_(inside, total, Float32(0.0))) for output, total in sums.items()}


def _place(part: Part, at: Read | Write, column: Any) -> Any:
    """Where the tensor has what the part's `column` is (core.sweep.columns)."""
    if at.lane is not None:
        column = column // part.half * (2 * part.half) + at.lane * part.half + column % part.half
    return column + at.start


def _load(sweep: Sweep, part: Part, inputs: list[Any], row: Any, column: Any) -> list[Any]:
    """What a part reads of a row, as float32; None of a feature."""
    found = list[Any]()
    for read in part.reads:
        tensor, place = inputs[read.input], _place(part, read, column)
        if read.extent == "feature":
            found.append(None)
        elif read.extent == "token":
            found.append([tensor[row].to(Float32)] * VECTOR)
        elif read.extent == "table":
            found.append(_Widened(_vector(tensor, row % tensor.shape[0], place % tensor.shape[1])))
        elif read.extent == "heads":
            count, length = sweep.inputs[read.input][1] // read.inner, tensor.shape[1]
            head = row // length * count + place // read.inner
            found.append(_Widened(_vector(tensor, row % length, place % read.inner, head)))
        else:
            found.append(_Widened(_vector(tensor, row, place)))
    return found


class _Widened:
    """VECTOR neighbouring elements in registers, read as float32 where they are used, so that all loads come first."""

    def __init__(self, vector: Any) -> None:
        self.found = cute.make_rmem_tensor((VECTOR,), vector.element_type)
        cute.autovec_copy(vector, self.found)

    def __getitem__(self, k: int) -> Any:
        return self.found[k].to(Float32)


def _vector(tensor: Any, row: Any, column: Any, head: Any = None) -> Any:
    """VECTOR neighbouring elements of a row, of one of several matrices if there are heads."""
    if head is not None:
        vectors = cute.zipped_divide(tensor, (1, 1, VECTOR))
        return vectors[(0, 0, None), (head, row, column // VECTOR)]
    return cute.zipped_divide(tensor, (1, VECTOR))[(0, None), (row, column // VECTOR)]


def _feature(part: Part, read: Read, inputs: list[Any], column: Any) -> list[Any] | None:
    """What a part reads of a feature, whatever the row."""
    if read.extent != "feature":
        return None
    place = _place(part, read, column)
    return [inputs[read.input][0, place + k].to(Float32) for k in range(VECTOR)]


def _zeros() -> Any:
    found = cute.make_rmem_tensor((VECTOR,), Float32)
    found.fill(0.0)
    return found


def _add_up(over_m: list[Any], made: list[list[Any]], inside: Any) -> None:
    for total, values in zip(over_m, made, strict=True):
        for k in range(VECTOR) if total is not None else ():
            total[k] += cutlass.select_(inside, values[k], Float32(0.0))


def _store(sweep: Sweep, part: Part, made: list[Any], stored: list[Any], row: Any, column: Any) -> None:
    """A row's values that go to tiles."""
    for w, values in zip(part.writes, made, strict=True):
        if (tile := stored[w.output]) is not None:
            found = cute.make_rmem_tensor((VECTOR,), tile.element_type)
            for k in range(VECTOR):
                found[k] = values[k].to(tile.element_type)
            cute.autovec_copy(found, _vector(tile, row, _place(part, w, column)))


def _of_the_warp(value: Any) -> Any:
    for d in range(5):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << d)
    return value
