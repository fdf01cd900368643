"""An elementwise pass over tensors [M, N]: what it reads once, and what it writes, in rows or transposed, or takes over
each row or column.

Mostly for what stands between products of 8-bit matrices: each tensor is cast with a scale for each row and again,
transposed, with one for each column, and the scales are made of the largest values. Also for the loss of scores that
no epilogue makes. One frozen record for code generation, cache key and launch, as the Region is; its meaning is
`interpret`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.interpret import SHAPE
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import Keyed, Let, Operand

AXES = {"M": 0, "N": 1}
LARGEST, MAXIMUM, EXPONENTIALS = "largest", "maximum", "exponentials"
TAKEN: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    LARGEST: (lambda x, dim: x.abs().amax(dim), "MN"),
    MAXIMUM: (lambda x, dim: x.amax(dim), "N"),
    EXPONENTIALS: (lambda x, dim: (x - x.amax(dim, keepdim=True)).exp().sum(dim), "N"),
}
"""What may be taken of a value [M, N], and over which axes: its largest magnitude; its maximum; and the sum of exp(x -
maximum), of which a softmax is made. NaN is larger than any number. The last two walk along whole rows."""

PLACED = "placed"
"""A statement's operation: a number in the column of that place (from 0, up to 2 ** 24), and 0 in the others."""


@dataclass(frozen=True, slots=True)
class Output:
    """The value `value` leaves as a contiguous tensor of `dtype`: [M, N], or `transposed` [N, M]. Or what is `taken` of
    it does, in float32: over "N" of each row [M], over "M" of each column [N]."""

    value: str
    dtype: str
    transposed: bool = False
    over: str = ""
    taken: str = LARGEST


@dataclass(frozen=True)
class Elementwise(Keyed):
    """operands -> lets -> outputs, in float32. Operands are the operation's inputs, in this order: "tile" is [M, N],
    "token" [M], "feature" [N], "scalar" one number. `n` is N."""

    n: int
    operands: tuple[Operand, ...]
    lets: tuple[Let, ...]
    outputs: tuple[Output, ...]

    @property
    def tile(self) -> int:
        """Which input is [M, N]; the first of several."""
        return [o.extent for o in self.operands].index("tile")

    @property
    def along_rows(self) -> bool:
        """Does its kernel walk along whole rows? Then that is all that it does."""
        return any(out.taken != LARGEST for out in self.outputs)

    def sizes(self, m: Any) -> list[tuple[Any, ...]]:
        """Of the outputs, for M rows."""
        kinds = {"N": (m,), "M": (self.n,)}
        return [kinds.get(out.over, (self.n, m) if out.transposed else (m, self.n)) for out in self.outputs]


def parse(text: str) -> Elementwise:
    """The record that `Elementwise.text` wrote."""
    d: dict[str, Any] = json.loads(text)
    return Elementwise(
        n=d["n"],
        operands=tuple(Operand(**o) for o in d["operands"]),
        lets=tuple(Let(x["name"], x["op"], tuple(x["args"])) for x in d["lets"]),
        outputs=tuple(Output(**s) for s in d["outputs"]),
    )


def verify(record: Elementwise) -> Elementwise:
    """Returns the record, or raises BrokenInvariant with what is wrong with it."""
    names = [o.name for o in record.operands]
    problems = [] if any(o.extent == "tile" for o in record.operands) else ["no operand [M, N]"]
    problems += [f"{o.name} per {o.extent}" for o in record.operands if o.extent not in (*SHAPE, "tile", "scalar")]
    for let in record.lets:
        known = all(a in names for a in let.args if isinstance(a, str))
        row = OPS.get(let.op)
        computed = bool(row and row.triton and len(let.args) == row.arity and known)
        placed = let.op == PLACED and [type(a) for a in let.args] == [str, float] and known
        if not computed and not placed:
            problems.append(f"{let.name} = {let.op}{let.args}")
        names.append(let.name)
    for out in record.outputs:
        axes = TAKEN[out.taken][1] if out.taken in TAKEN else ""
        reduced = len(out.over) == 1 and out.over in axes and out.dtype == "f32" and not out.transposed
        written = not out.over and out.taken == LARGEST
        alike = record.along_rows == (out.taken != LARGEST)
        if out.value not in names or not alike or not (reduced or written):
            problems.append(f"{out.value} as {out.dtype}, {out.taken} over {out.over!r}")
    if problems or not record.outputs or len({*names}) < len(names):
        what = "; ".join(problems) or "no output, or a name twice"
        raise BrokenInvariant(f"elementwise pass {record.digest}: {what}")
    return record


def interpret(record: Elementwise, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, on torch."""
    values: dict[str, Any] = {}
    for o, x in zip(record.operands, inputs, strict=True):
        shape = SHAPE.get(o.extent, () if o.extent == "scalar" else x.shape)
        values[o.name] = x.to(torch.float32).reshape(shape)
    columns = torch.arange(record.n, dtype=torch.float32, device=inputs[0].device).reshape(SHAPE["feature"])

    def placed(place: Tensor, number: float) -> Tensor:
        return torch.where(columns == place, columns.new_tensor(number), columns.new_zeros(()))

    for let in record.lets:
        args: list[Any] = [values[a] if isinstance(a, str) else a for a in let.args]
        values[let.name] = placed(*args) if let.op == PLACED else OPS[let.op].torch(*args)
    shape = inputs[record.tile].shape
    made = []
    for out in record.outputs:
        value = values[out.value].expand(shape)
        if out.over:
            made.append(TAKEN[out.taken][0](value, AXES[out.over]))
            continue
        made.append((value.t() if out.transposed else value).to(DTYPES[out.dtype]).contiguous().clone())
    return made


def told(record: Elementwise) -> str:
    """What it makes, in words: "read once, written as e4m3, e4m3 transposed"."""
    outputs = [f"{o.dtype}{' transposed' * o.transposed}" for o in record.outputs if not o.over]
    largest = [{"N": "rows", "M": "columns"}[o.over] for o in record.outputs if o.over and o.taken == LARGEST]
    said = [f"written as {', '.join(outputs)}"] * bool(outputs)
    said += [f"for the largest of {' and '.join(largest)}"] * bool(largest)
    said += ["for the maximum and the sum of a softmax of rows"] * record.along_rows
    return f"read once, {', '.join(said)}"
