"""What a Region means: run it on torch tensors, rounding where the kernel stores.

The oracle of every kernel test, the reference target, and the implementation behind the operation on devices without
generated kernels (there in blocks of rows: blocks.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.ops import OPS
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Operand, Product, Region

SHAPE = {"token": (-1, 1), "feature": (1, -1)}


def interpret(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
    """`inputs`: matrices, then operands, as Region says. Returns the stores [M, width], then the reductions [M] or
    [N], each in memory of its own: a functional operation may return neither an input nor one tensor twice."""
    made = dict[int, Tensor]()
    for i, value in evaluated(region, inputs, range(len(region.stores) + len(region.reductions))):
        if i < len(region.stores):
            dtype = DTYPES[region.stores[i].dtype]
            made[i] = torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)
        else:
            made[i] = value
    return [made[i] for i in range(len(made))]


def evaluated(
    region: Region, inputs: Sequence[Tensor], wanted: Collection[int], at_once: int | None = None, start: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """The `wanted` outputs, by their place among stores and reductions, each as soon as it is there: stores [M, width]
    before they are rounded, reductions finished. What nothing wants any more is not kept. Of a weight of more than
    `at_once` numbers only so many are widened at a time. The inputs' rows are those from `start` on, but for operands
    of samples, which are whole."""
    left, values = _leaving(region, wanted), dict[str, Tensor | float]()
    given = {o.name: (o, x) for o, x in zip(region.operands, inputs[region.matrices :], strict=True)}
    uses = _uses(region, left)

    def taken(name: str) -> Tensor | float:
        if name not in values:
            values[name] = _operand(region, *given[name], start, shape[0])
        uses[name] -= 1
        return values[name] if uses[name] else values.pop(name)

    for lane, p in enumerate(region.products):
        values[p.name] = _product(region, lane, p, inputs, at_once)
    shape = torch.broadcast_shapes(*(values[p.name].shape for p in region.products))  # type: ignore[union-attr]
    for let in (None, *region.lets):
        if let is not None and not uses[let.name]:
            continue
        if let is not None:
            values[let.name] = OPS[let.op].torch(*(taken(a) if isinstance(a, str) else a for a in let.args))
        for i in [i for i, names in left.items() if all(n in values or n in given for n in names)]:
            tiles = [taken(name).expand(shape) for name in left.pop(i)]  # type: ignore[union-attr]
            yield i, _output(region, i, tiles)
            del tiles


def _leaving(region: Region, wanted: Collection[int]) -> dict[int, tuple[str, ...]]:
    """The values that each wanted output is made of."""
    stores = [(s.value, s.second) if region.half else (s.value,) for s in region.stores]
    return {i: names for i, names in enumerate([*stores, *((r.value,) for r in region.reductions)]) if i in wanted}


def _uses(region: Region, left: dict[int, tuple[str, ...]]) -> Counter[str]:
    """How often each value is read on the way to these outputs."""
    uses = Counter(name for names in left.values() for name in names)
    for let in reversed(region.lets):
        uses.update(a for a in let.args if isinstance(a, str) and uses[let.name])
    return uses


def _output(region: Region, i: int, tiles: Sequence[Tensor]) -> Tensor:
    """A store before it is rounded, or a finished reduction."""
    if i >= len(region.stores):
        r = region.reductions[i - len(region.stores)]
        if r.tokens:
            return REDUCTIONS[r.of].torch(tiles[0].unflatten(0, (-1, r.tokens)), 1).flatten()
        return REDUCTIONS[r.of].torch(tiles[0], 1 if r.over == "N" else 0)
    if region.half:
        return torch.stack([v.unflatten(1, (-1, region.block)) for v in tiles], 2).flatten(1)
    return tiles[0]


def _product(region: Region, lane: int, p: Product, matrices: Sequence[Tensor], at_once: int | None) -> Tensor:
    """An accumulator [M, N]."""
    total: Tensor | None = None
    for x, w in p.pairs:
        b = matrices[w]
        b = b.unflatten(0, (-1, 2, region.block))[:, lane].flatten(0, 1) if region.half else b
        a = matrices[x].to(region.compute)
        a, b = a if p.a_layout == "mk" else a.t(), b.t() if p.b_layout == "nk" else b
        step = b.shape[1] if at_once is None else max(1, at_once // b.shape[0])
        out = a @ b.to(region.compute) if b.shape[1] <= step else _by_columns(a, b, step)
        total = out if total is None else total + out
    assert total is not None
    return total


def _by_columns(a: Tensor, b: Tensor, step: int) -> Tensor:
    """a @ b, of which `step` columns at a time are widened."""
    out = a.new_empty(a.shape[0], b.shape[1])
    for part, some in zip(out.split(step, 1), b.split(step, 1), strict=True):
        part.copy_(a @ some.to(a.dtype))
    return out


def _operand(region: Region, operand: Operand, tensor: Tensor, start: int, m: int) -> Tensor:
    """An operand as the statements read it, in m rows from `start` on."""
    value = tensor.to(region.compute)
    if region.half and operand.extent in ("feature", "table"):
        return _pairs(region, value)
    if operand.extent == "sample":
        first, last = start // operand.tokens, -(-(start + m) // operand.tokens)
        rows = value[first:last].repeat_interleave(operand.tokens, 0)
        return rows.narrow(0, start - first * operand.tokens, m)
    return value.reshape(SHAPE.get(operand.extent, tensor.shape))


def _pairs(region: Region, value: Tensor) -> Tensor:
    """[1 or M, N, 2]: a feature's halves, as the heads lie, or a table's entries."""
    if value.dim() == 1:
        return value.view(-1, 2, region.block).transpose(1, 2).reshape(1, -1, 2)
    return value.view(-1, 1, region.half, 2).expand(-1, region.n // region.half, -1, -1).flatten(1, 2)
