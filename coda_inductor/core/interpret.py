"""What a Region means: run it on torch tensors, rounding where the kernel stores.

The oracle of every kernel test, the reference target, and the implementation behind the operation on devices without
generated kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda_inductor.core.ops import OPS
from coda_inductor.core.region import DTYPES, Region

SHAPE = {"token": (-1, 1), "feature": (1, -1)}
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"sum": torch.sum, "logsumexp": torch.logsumexp}


def interpret(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
    """`inputs`: matrices, then operands, as Region says. Returns the stores [M, N], then the reductions [M] or
    [N], each in memory of its own: a functional operation may return neither an input nor one tensor twice."""
    matrices, operands = inputs[: region.matrices], inputs[region.matrices :]
    values: dict[str, Tensor | float] = {}
    for p in region.products:
        b = matrices[p.b].to(region.compute)
        values[p.name] = matrices[p.a].to(region.compute) @ (b.t() if p.b_layout == "nk" else b)
    for o, tensor in zip(region.operands, operands, strict=True):
        values[o.name] = tensor.to(region.compute).reshape(SHAPE.get(o.extent, tensor.shape))
    for let in region.lets:
        values[let.name] = OPS[let.op].torch(*(values[a] if isinstance(a, str) else a for a in let.args))
    shape = torch.broadcast_shapes(*(values[p.name].shape for p in region.products))  # type: ignore[union-attr]
    tile = {name: value.expand(shape) for name, value in values.items() if isinstance(value, Tensor)}
    stores = [
        torch.empty(shape, dtype=DTYPES[s.dtype], device=tile[s.value].device).copy_(tile[s.value])
        for s in region.stores
    ]
    return stores + [REDUCTIONS[r.of](tile[r.value], 1 if r.over == "N" else 0) for r in region.reductions]
