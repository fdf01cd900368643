"""What an epilogue may take over the columns or the rows of its tile: one row per reduction.

A row is all that knows a reduction: graphs are read and written by `aten`, the interpreter calls `torch`, generated
modules name a class of codegen/sinks.py, and codegen/finish.py has the kernel that makes one result of what the tiles
left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReductionOp:
    """`torch` reduces a tensor over a dimension; `join` makes one of what two parts of it gave. `aten` is the ATen
    operation of (tensor, dimensions).

    `sinks` has the class of codegen/sinks.py that takes it in an epilogue, by what it is taken over: "N" leaves one
    number for each row, "M" for each column. Without one the graph is read and written, and Inductor computes it.

    `linear`: it adds up. Then a factor or a zero beside it costs nothing, and places past the edge of the matrix are
    masked unless they are 0; others leave them out by themselves. `planes`: numbers for each row that warps pass on.
    `stored`: of a value that is stored in fewer bits it is taken as it was rounded, since who reads it compares it with
    what is stored. `repeats`: of a value twice it is the same as of it once.
    `selects`: it is one of the values. Rounding keeps their order, so of rounded values it is the rounded one.
    """

    torch: Callable[[Tensor, int], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    aten: str
    sinks: Mapping[str, str] = field(default_factory=dict)
    linear: bool = False
    planes: int = 1
    stored: bool = False
    repeats: bool = False
    selects: bool = False

    @property
    def passes_over_zeros(self) -> bool:
        """Does a 0 beside a number that is not negative change nothing?"""
        one, zero = (torch.tensor(x, device="cpu") for x in (1.0, 0.0))
        return float(self.join(one, zero)) == 1.0


REDUCTIONS = {
    "sum": ReductionOp(
        torch.sum, torch.add, "sum.dim_IntList", {"N": "ColVecReduce", "M": "RowVecReduce"}, linear=True
    ),
    "max": ReductionOp(
        torch.amax,
        torch.maximum,
        "amax.default",
        {"N": "ColVecMax", "M": "RowVecMax"},
        stored=True,
        repeats=True,
        selects=True,
    ),
    "logsumexp": ReductionOp(
        torch.logsumexp, torch.logaddexp, "logsumexp.default", {"N": "OnlineLSEReduce"}, planes=2, stored=True
    ),
}
