"""What a Region means: run it on torch tensors, rounding where the kernel stores.

The oracle of every kernel test, the reference target, and the implementation behind the operation on devices without
generated kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda_inductor.core.ops import OPS
from coda_inductor.core.region import DTYPES, Region, Store

SHAPE = {"token": (-1, 1), "feature": (1, -1)}
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"sum": torch.sum, "logsumexp": torch.logsumexp}


def interpret(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
    """`inputs`: matrices, then operands, as Region says. Returns the stores [M, width], then the reductions [M] or
    [N], each in memory of its own: a functional operation may return neither an input nor one tensor twice."""
    matrices, operands = inputs[: region.matrices], inputs[region.matrices :]
    values: dict[str, Tensor | float] = {}
    for lane, p in enumerate(region.products):
        for x, w in p.pairs:
            b = matrices[w].to(region.compute)
            b = b.unflatten(0, (-1, 2, region.half))[:, lane].flatten(0, 1) if region.half else b
            a = matrices[x].to(region.compute)
            out = (a if p.a_layout == "mk" else a.t()) @ (b.t() if p.b_layout == "nk" else b)
            values[p.name] = values[p.name] + out if p.name in values else out
    for o, tensor in zip(region.operands, operands, strict=True):
        value = tensor.to(region.compute)
        if region.half and o.extent in ("feature", "table"):
            values[o.name] = _pairs(region, value)
        else:
            values[o.name] = value.reshape(SHAPE.get(o.extent, tensor.shape))
    for let in region.lets:
        values[let.name] = OPS[let.op].torch(*(values[a] if isinstance(a, str) else a for a in let.args))
    shape = torch.broadcast_shapes(*(values[p.name].shape for p in region.products))  # type: ignore[union-attr]
    tile = {name: v.expand(shape) for name, v in values.items() if isinstance(v, Tensor) and v.dim() == len(shape)}
    stores = [_stored(region, s, tile) for s in region.stores]
    return stores + [REDUCTIONS[r.of](tile[r.value], 1 if r.over == "N" else 0) for r in region.reductions]


def _pairs(region: Region, value: Tensor) -> Tensor:
    """[1 or M, N, 2]: a feature's halves, as the heads lie, or a table's entries."""
    if value.dim() == 1:
        return value.view(-1, 2, region.half).transpose(1, 2).reshape(1, -1, 2)
    return value.view(-1, 1, region.half, 2).expand(-1, region.n // region.half, -1, -1).flatten(1, 2)


def _stored(region: Region, store: Store, tile: dict[str, Tensor]) -> Tensor:
    value = tile[store.value]
    if region.half:
        halves = (v.unflatten(1, (-1, region.half)) for v in (value, tile[store.second]))
        value = torch.stack([*halves], 2).flatten(1)
    return torch.empty(value.shape, dtype=DTYPES[store.dtype], device=value.device).copy_(value)
