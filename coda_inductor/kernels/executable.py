"""A compiled kernel that can be launched, with what its launch must know. Needs no compiler.

One compiled kernel serves every M: nothing is keyed on the token count, and a launch fills in pointers and calls the
compiled host function (under 1 us plus the driver; quack's own entry point takes 9 to 14 us and rebuilds its plan for
each new M, 28 us).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from coda_inductor.codegen import source
from coda_inductor.codegen.legality import TILE_K
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.blocks import empty_rows
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.region import Reduction, Region


class Parts(NamedTuple):
    """The host function (of A, B, D, C, the epilogue's and the scheduler's arguments, and three that are None), the
    names of the epilogue's arguments, the scheduler's swizzle, and local memory in bytes per thread (None: unknown)."""

    function: Any
    fields: tuple[str, ...]
    swizzle: int
    stack: int | None


Run = Callable[[int, int], None]
"""Launches a kernel, told the addresses of two doors (doors.py): with one to enter by it may begin before the kernel
before it has ended, by the other that after it may (0: there is none)."""


class Executable:
    """One kernel. `stack` is its local memory in bytes per thread (spilled registers), None if unknown."""

    def __init__(self, region: Region, config: Config, parts: Parts, *, swapped: bool = False) -> None:
        self.region, self.config, self.stack = region, config, parts.stack
        self._run = parts.function
        self._scheduler = (resident(config), None, parts.swizzle, None, None, None)
        self._bind(region, parts.fields, swapped)

    def _bind(self, region: Region, fields: tuple[str, ...], swapped: bool) -> None:
        """Positions: which input or output goes to which field of the epilogue's arguments."""
        names = source.slots(region)
        place = {field: i for i, field in enumerate(fields)}
        first = region.matrices
        self._blank: list[Any] = [None] * len(fields)
        self._inputs = [(place[s], first + i) for i, s in enumerate(names.operands) if s != "c"]
        self._widened = [
            (place[s], first + i)
            for i, (s, o) in enumerate(zip(names.operands, region.operands, strict=True))
            if len(region.products) == 2 and o.extent in ("feature", "sample") and o.dtype != "f32"
        ]
        self._samples = [(place[s], o.tokens) for s, o in zip(names.operands, region.operands, strict=True) if o.tokens]
        self._stores = [(place[s], i) for i, s in enumerate(names.stores) if s != "D"]
        self._seconds = [(place[s], place[source.second(s)]) for s in names.stores] if region.halved else []
        totals = zip(names.sums, region.reductions, strict=True)
        # By whether they are over M: the fields of parts and whole, the output, the reduction.
        self._sums: dict[bool, list[tuple[int, int, int, Reduction]]] = {}
        for i, (s, r) in enumerate(totals, len(names.stores)):
            self._sums.setdefault(r.over == "M", []).append((place[s], place[source.whole(s)], i, r))
        self._c = first + names.operands.index("c") if "c" in names.operands else None
        self._d = 0 if "D" in names.stores else None
        products = region.products[::-1] if swapped else region.products
        self._a, self._b, self._second = products[0].a, products[0].b, products[-1].b
        self._offset = place.get("lane_offset")
        self._plus = products[0].plus
        self._turned = products[0].a_layout == "km"
        self._doors = [place[field] for field in source.DOORS]
        self._spans = [place[field] for field in source.SPANS] if region.spanned else []
        self._second_matrices = [place[field] for field in source.SECONDS] if region.unlike else []

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run:
        """What launches the kernel, and until then keeps all that it reads and writes. `inputs` as the Region orders
        them, on one device, in 16-byte aligned rows; `outs`: stores, in such rows too, then sums. What is None is
        written to scratch. M >= 1."""
        if self.config.turned:
            return self._turned_over(inputs[self._a], inputs[self._b], outs[0])
        a, b = inputs[self._a].t() if self._turned else inputs[self._a], inputs[self._b]
        fields = self._blank.copy()
        for field, i in self._inputs:
            fields[field] = inputs[i]
        for field, i in self._widened:
            fields[field] = inputs[i].float()
        for field, tokens in self._samples:
            fields[field] = _by_rows(fields[field], tokens)
        for field, i in self._stores:
            out = outs[i]
            fields[field] = self._scratch(i, a) if out is None else out
        for field, other in self._seconds:
            fields[other] = fields[field]  # one tensor, of whose heads each store takes its halves
        for over_m, sums in self._sums.items():
            m = a.shape[0]
            shape, strides = self._partials(m, over_m)
            empty = guards._empty_strided_cuda if a.is_cuda else guards._empty_strided_cpu  # type: ignore[attr-defined]
            for part, whole, i, total in sums:
                out = outs[i]
                fields[part] = empty(shape, strides, torch.float32)
                fields[whole] = empty((self.region.length(total, m),), (1,), torch.float32) if out is None else out
        if self._second_matrices:
            assert self._plus is not None
            given = inputs[self._plus[0]], inputs[self._plus[1]], self.region.products[0].k // TILE_K
            for field, value in zip(self._second_matrices, given, strict=True):
                fields[field] = value
        elif self._plus is not None:
            a, a_apart, a_turned = _spanned(a, inputs[self._plus[0]])
            b, b_apart, b_turned = _spanned(b, inputs[self._plus[1]])
            for field, value in zip(self._spans, (a_apart, b_apart, int(a_turned), int(b_turned)), strict=True):
                fields[field] = value
        if self._offset is not None:
            # From the first weight to the second, in elements.
            fields[self._offset] = (inputs[self._second].data_ptr() - b.data_ptr()) // b.element_size()
        d = None if self._d is None else outs[self._d]
        if d is None and self._d is not None:
            d = self._scratch(self._d, a)
        c = None if self._c is None else inputs[self._c]

        def run(entrance: int, way_out: int, read: Any = inputs) -> None:  # a second weight is in no field: an address
            fields[self._doors[0]], fields[self._doors[1]] = entrance, way_out
            self._run(a, b, d, c, tuple(fields), self._scheduler, None, None, None)

        return run

    def _turned_over(self, a: Tensor, b: Tensor, out: Tensor | None) -> Run:
        """As `prepare`, of a product alone: the right matrix is the kernel's left one; the store lies in columns."""
        across = self.region.products[0].b_layout == "kn"
        fields = self._blank.copy()
        out = self._scratch(0, a.t() if self._turned else a) if out is None else out
        left, store = b.t() if across else b, out.t()

        def run(entrance: int, way_out: int) -> None:
            fields[self._doors[0]], fields[self._doors[1]] = entrance, way_out
            self._run(left, a, store, None, tuple(fields), self._scheduler, None, None, None)

        return run

    def _partials(self, m: int, over_m: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shape and strides of what the tiles leave of a sum: [tiles of M, N] or [M, tiles of N], either way with one
        tile's behind another's. Of two products, N counts the columns of both."""
        n, count = self.region.n, len(self.region.products)
        if over_m:
            return (-(-m // self.config.tile_m), n * count), (n * count, 1)
        return (m, -(-n * count // self.config.tile_n)), (1, m)

    def _scratch(self, i: int, like: Tensor) -> Tensor:
        """Rows for a store that nobody reads."""
        return empty_rows(like, like.shape[0], self.region.width, DTYPES[self.region.stores[i].dtype])


def _by_rows(x: Tensor, tokens: int) -> Tensor:
    """Vectors of samples [samples, N] for each row, [samples, tokens, N], without a copy."""
    samples, n = x.shape
    return x.as_strided((samples, tokens, n), (x.stride(0), 0, 1))


def _spanned(x: Tensor, y: Tensor) -> tuple[Tensor, int, bool]:
    """(that of two tensors which lies first, how many of its elements later the other starts, is it y)."""
    apart = (y.data_ptr() - x.data_ptr()) // x.element_size()
    return (x, apart, False) if apart > 0 else (y, -apart, True)


def resident(config: Config) -> int:
    """How many clusters the current GPU holds at once, with a block on each multiprocessor: these come in pairs that
    share a cluster. 1 without a GPU, where kernels are compiled only."""
    if not torch.cuda.is_available():
        return 1
    multiprocessors: int = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return multiprocessors // (config.cluster_m * config.cluster_n)
