"""An elementwise pass over tensors [M, N]: what it reads once, and what it writes, in rows or transposed, or the
largest of each row and column.

Mostly for what stands between products of 8-bit matrices: each tensor is cast with a scale for each row and again,
transposed, with one for each column, and the scales are made of the largest values. One frozen record for code
generation, cache key and launch, as the Region is; its meaning is `interpret`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Output:
    """The value `value` leaves as a contiguous tensor of `dtype`: [M, N], or `transposed` [N, M]. Or its largest
    magnitude does, in float32: over "N" of each row [M], over "M" of each column [N]. NaN is larger than any number."""

    value: str
    dtype: str
    transposed: bool = False
    largest_over: str = ""


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

    def sizes(self, m: Any) -> list[tuple[Any, ...]]:
        """Of the outputs, for M rows."""
        kinds = {"N": (m,), "M": (self.n,)}
        return [kinds.get(out.largest_over, (self.n, m) if out.transposed else (m, self.n)) for out in self.outputs]


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
        if let.op not in OPS or not OPS[let.op].triton or len(let.args) != OPS[let.op].arity or not known:
            problems.append(f"{let.name} = {let.op}{let.args}")
        names.append(let.name)
    for out in record.outputs:
        largest = out.largest_over in AXES and out.dtype == "f32" and not out.transposed
        if out.value not in names or (out.largest_over and not largest):
            problems.append(f"{out.value} as {out.dtype}, largest over {out.largest_over!r}")
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
    for let in record.lets:
        values[let.name] = OPS[let.op].torch(*(values[a] if isinstance(a, str) else a for a in let.args))
    shape = inputs[record.tile].shape
    made = []
    for out in record.outputs:
        value = values[out.value].expand(shape)
        if out.largest_over:
            made.append(value.abs().amax(AXES[out.largest_over]))
            continue
        made.append((value.t() if out.transposed else value).to(DTYPES[out.dtype]).contiguous().clone())
    return made


def told(record: Elementwise) -> str:
    """What it makes, in words: "read once, written as e4m3, e4m3 transposed"."""
    outputs = [f"{o.dtype}{' transposed' * o.transposed}" for o in record.outputs if not o.largest_over]
    largest = [{"N": "rows", "M": "columns"}[o.largest_over] for o in record.outputs if o.largest_over]
    said = [f"written as {', '.join(outputs)}"] * bool(outputs)
    said += [f"for the largest of {' and '.join(largest)}"] * bool(largest)
    return f"read once, {', '.join(said)}"
