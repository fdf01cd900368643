"""A Region on torch into tensors that are there, in blocks of rows: what that takes beside them does not grow
with M. (All at once, one value of an LM head of 128256 columns over 8192 tokens takes 4.2 GB.)"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.interpret import evaluated
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Region

NUMBERS = 1 << 24  # of one value at a time: 64 MB in float32


LINE = 64
"""Rows that are no multiple of 8 long lie a multiple of so many elements apart: of 16 bits, 128 bytes."""


def pitch(columns: int) -> int:
    """How many elements apart rows of so many lie, where a kernel writes them: its stores begin at multiples of 16
    bytes. 50257 columns lie 50304 apart, 768 lie 768 apart."""
    return columns if columns % 8 == 0 else -(-columns // LINE) * LINE


def empty_rows(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An empty matrix [rows, columns] of such a pitch."""
    return like.new_empty_strided((rows, columns), (pitch(columns), 1), dtype=dtype)


def copied_in_rows(matrix: Tensor) -> Tensor:
    """A copy of a matrix in rows of such a pitch."""
    return empty_rows(matrix, matrix.shape[0], matrix.shape[1], matrix.dtype).copy_(matrix)


def outputs(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs for `inputs`, empty, or zeros to add to: the stores [M, width], then the reductions."""
    like, m = inputs[region.products[0].a], region.m(inputs)
    stores = [empty_rows(like, m, region.width, DTYPES[s.dtype]) for s in region.stores]
    for out in stores if region.adds else ():
        out.zero_()
    sizes = [region.length(r, m) for r in region.reductions]
    return stores + [like.new_empty(size, dtype=region.compute) for size in sizes]


def poison(region: Region, outs: Sequence[Tensor]) -> None:
    """Fills outputs with NaN, so that what a kernel does not write is seen; with zeros those that it adds to."""
    for out in outs:
        out.fill_(0.0 if region.adds else math.nan)


def into(region: Region, inputs: Sequence[Tensor], outs: Sequence[Tensor | None], numbers: int | None = None) -> None:
    """What the interpreter returns goes to `outs` (None: unread), of which none overlaps another or an input. Bit for
    bit as it computes it where M rows are one block; of several, reductions over M are joined block by block, and torch
    may add up a product in another order for fewer rows. A Region that adds to its output is added to it."""
    wanted, numbers = [i for i, out in enumerate(outs) if out is not None], numbers or NUMBERS
    m, rows = region.m(inputs), max(1, numbers // max(region.width, *region.ks.values()))
    rows = max(region.multiple, rows // region.multiple * region.multiple)
    dims = {a: region.m_axis[1] for p in region.products for a, _ in p.pairs}
    dims |= {i: 0 for i, o in enumerate(region.operands, region.matrices) if o.extent not in ("feature", "sample")}
    stored = len(region.stores)
    for start in range(0, max(m, 1), rows):
        here = min(rows, m - start)
        some = [x.narrow(dims[i], start, here) if i in dims and here < m else x for i, x in enumerate(inputs)]
        for i, value in evaluated(region, some, wanted, numbers, start):
            out, reduction = outs[i], region.reductions[i - stored] if i >= stored else None
            assert out is not None
            if reduction is None or reduction.over == "N":
                there = out[start : start + here]
                there.add_(value) if region.adds else there.copy_(value)
            elif reduction.tokens:
                out[region.length(reduction, start) :][: len(value)].copy_(value)
            else:
                out.copy_(REDUCTIONS[reduction.of].join(out, value) if start else value)
            del value
