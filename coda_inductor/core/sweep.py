"""The Sweep: one pass over tensors that lie in memory, which stores tiles and adds up rows and columns on its way.

What is left beside an operation that is no product of ours, as attention's backward: its gradients are put side by
side, turned back through rotary embeddings, and summed, over the features for a norm's statistic and over the tokens
for a bias. Like the Region it is one frozen record for legality, cost, explain, cache key and launch; M is not part of
it. It has no product and no optimiser. Its meaning is `interpret` below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.ops import OPS
from coda_inductor.core.record import Record
from coda_inductor.core.region import DTYPES, Let

Extent = Literal["token", "feature", "tile", "table", "heads"]


@dataclass(frozen=True, slots=True)
class Read:
    """The value `name`, of input `input`, read as float32 (float64 beside float64 inputs).

    A "tile" is [M, width], a "feature" [1, width], a "token" [M]; a "table" is [R, width], of which row m reads row
    m % R.
    Column c of the part reads column `start` + c of what has as many, or c % width of a table. In a part of halves
    `lane` 0 or 1 says which half of the heads is read (column c is the number c % half of head c // half), None that
    the tensor has no halves.
    """

    name: str
    input: int
    extent: Extent
    start: int = 0
    lane: int | None = None
    inner: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """The value `value` goes to output `output`: to the columns of a tile, as a Read's `start` and `lane` say; to those
    of a feature, summed over M; to a token, summed over N and added to what other writes give."""

    value: str
    output: int
    start: int = 0
    lane: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """reads -> lets -> writes, all over [M, n]. With `half` each of the n columns stands for a pair, the same place in
    both halves of a head of 2 * half."""

    n: int
    half: int
    reads: tuple[Read, ...]
    lets: tuple[Let, ...]
    writes: tuple[Write, ...]

    @property
    def tiles(self) -> set[str]:
        """The names of what is made of a tile."""
        found = {read.name for read in self.reads if read.extent in ("tile", "table", "heads")}
        for let in self.lets:
            found |= {let.name} if found.intersection(map(str, let.args)) else set()
        return found


@dataclass(frozen=True, slots=True)
class Output:
    """A stored "tile" [M, width], or the sums of a "feature" [width] or a "token" [M], which are float32 (float64)."""

    extent: Literal["tile", "feature", "token"]
    width: int
    dtype: str


@dataclass(frozen=True)
class Sweep(Record):
    """Parts that lie side by side, each with columns and statements of its own. `inputs` are the tensors' dtypes and
    widths (0: of a token); the first is a tile, or heads."""

    inputs: tuple[tuple[str, int], ...]
    parts: tuple[Part, ...]
    outputs: tuple[Output, ...]

    @property
    def compute(self) -> torch.dtype:
        """The dtype of all arithmetic, and of sums."""
        return torch.float64 if any(dtype == "f64" for dtype, _ in self.inputs) else torch.float32

    def tokens(self, sizes: Sequence[Any]) -> Any:
        """M, of the sizes of the first input."""
        inner = next(r.inner for part in self.parts for r in part.reads if not r.input)
        return sizes[0] * sizes[1] // (self.inputs[0][1] // inner) if inner else sizes[0]

    def to(self, output: int) -> Iterator[tuple[Part, Write]]:
        """What goes to an output."""
        return ((p, w) for p in self.parts for w in p.writes if w.output == output)


def parse_sweep(text: str) -> Sweep:
    """The Sweep that `Sweep.text` wrote."""
    d: dict[str, Any] = json.loads(text)
    parts = (
        Part(
            p["n"],
            p["half"],
            tuple(Read(**r) for r in p["reads"]),
            tuple(Let(x["name"], x["op"], tuple(x["args"])) for x in p["lets"]),
            tuple(Write(**w) for w in p["writes"]),
        )
        for p in d["parts"]
    )
    inputs = tuple((dtype, width) for dtype, width in d["inputs"])
    return Sweep(inputs, tuple(parts), tuple(Output(**o) for o in d["outputs"]))


def columns(part: Part, at: Read | Write, width: int) -> list[int]:
    """Which of the `width` columns of a tensor the part's columns are."""
    found = range(part.n)
    half, lane = part.half, at.lane
    places = found if lane is None else [c // half * (2 * half) + lane * half + c % half for c in found]
    return [c % width if isinstance(at, Read) and at.extent == "table" else at.start + c for c in places]


def shape(output: Output, m: Any) -> tuple[Any, ...]:
    """An output's sizes for M tokens."""
    return {"tile": (m, output.width), "feature": (output.width,), "token": (m,)}[output.extent]


def interpret_sweep(sweep: Sweep, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs on torch tensors: rounded where the kernel stores, each in memory of its own."""
    m, device = sweep.tokens(inputs[0].shape), inputs[0].device
    outs = [torch.zeros(shape(o, m), dtype=DTYPES[o.dtype], device=device) for o in sweep.outputs]
    for part in sweep.parts:
        values: dict[str, Tensor | float] = {}
        for read in part.reads:
            x = inputs[read.input].to(sweep.compute)
            if read.extent == "token":
                values[read.name] = x.view(-1, 1)
                continue
            if read.extent == "heads":
                x = (
                    x.unflatten(0, (-1, sweep.inputs[read.input][1] // read.inner))
                    .transpose(1, 2)
                    .flatten(2)
                    .flatten(0, 1)
                )
            x = x[:, columns(part, read, x.shape[1])]
            values[read.name] = x.repeat(m // x.shape[0], 1) if read.extent == "table" else x
        for let in part.lets:
            values[let.name] = OPS[let.op].torch(*(values[a] if isinstance(a, str) else a for a in let.args))
        for write in part.writes:
            value, out = values[write.value], outs[write.output]
            assert isinstance(value, Tensor)
            value, extent = value.expand(m, part.n), sweep.outputs[write.output].extent
            if extent == "token":
                out += value.sum(1)
            elif extent == "feature":
                out[columns(part, write, len(out))] += value.sum(0)
            else:
                out[:, columns(part, write, out.shape[1])] = value.to(out.dtype)
    return outs


def some_rows(sweep: Sweep, inputs: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """The inputs of a Sweep over some of its rows only; heads with one row each."""
    extents = {r.input: r.extent for part in sweep.parts for r in part.reads}
    return [_some(x, extents.get(i, "feature"), sweep.inputs[i][1], rows) for i, x in enumerate(inputs)]


def _some(x: Tensor, extent: str, width: int, rows: Tensor) -> Tensor:
    if extent == "heads":
        length = x.shape[1]
        sequences = x.view(-1, width // x.shape[2], *x.shape[1:])
        return sequences[rows // length, :, rows % length].flatten(0, 1).unsqueeze(1)
    return x if extent == "feature" else x[rows % len(x) if extent == "table" else rows]


def verify_sweep(sweep: Sweep) -> Sweep:
    """Returns the Sweep, or raises BrokenInvariant with the expected and the found."""

    def check(holds: bool, message: str) -> None:
        if not holds:
            raise BrokenInvariant(f"sweep {sweep.digest}: {message}")

    check(bool(sweep.parts and sweep.outputs), "nothing leaves it")
    for dtype in (*(dtype for dtype, _ in sweep.inputs), *(o.dtype for o in sweep.outputs)):
        check(dtype in DTYPES, f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    tiles = {r.input for p in sweep.parts for r in p.reads if r.extent in ("tile", "heads")}
    check(0 in tiles, "its first input is no tile")
    wide = "f64" if sweep.compute == torch.float64 else "f32"
    for i, output in enumerate(sweep.outputs):
        check(output.extent == "tile" or output.dtype == wide, f"sums of {output.dtype}, not {wide}")
        check((output.width == 0) == (output.extent == "token"), f"output {i}: {output}")
        reached = [c for p, w in sweep.to(i) for c in columns(p, w, output.width)]
        whole = output.extent == "token" or sorted(reached) == [*range(output.width)]
        check(bool(reached) and whole, f"output {i} of {output.width} columns gets {len(reached)}")
    forms = {(r.input, r.extent, r.inner) for part in sweep.parts for r in part.reads}
    check(len(forms) == len({i for i, *_ in forms}), "an input is read as two things")
    for part in sweep.parts:
        _verify_part(sweep, part, check)
    return sweep


def _verify_part(sweep: Sweep, part: Part, check: Callable[[bool, str], None]) -> None:
    check(part.n > 0 and (not part.half or part.n % part.half == 0), f"{part.n} columns, halves of {part.half}")
    defined = set[str]()
    for read in part.reads:
        check(read.name.isidentifier() and read.name not in defined, f"name {read.name!r} is taken or no identifier")
        check(0 <= read.input < len(sweep.inputs), f"input {read.input} of {len(sweep.inputs)}")
        check(read.lane is None or (read.lane in (0, 1) and part.half > 0), f"{read} where there are no halves")
        width = sweep.inputs[read.input][1]
        check((width == 0) == (read.extent == "token"), f"{read} of an input of width {width}")
        check((read.inner > 0) == (read.extent == "heads"), f"{read}")
        check(not read.inner or width % read.inner == 0, f"{read} of an input of width {width}")
        if read.extent in ("tile", "feature", "heads"):
            check(max(columns(part, read, width)) < width, f"{read} of an input of width {width}")
        if read.extent == "table":
            read_through = part.n * (1 if read.lane is None else 2)
            check(read_through % width == 0, f"{read} of an input of width {width}")
        defined.add(read.name)
    for let in part.lets:
        names = [a for a in let.args if isinstance(a, str)]
        check(let.name.isidentifier() and let.name not in defined, f"name {let.name!r} is taken or no identifier")
        check(let.op in OPS and len(let.args) == OPS[let.op].arity, f"{let}: no such operation")
        check(let.op not in ("first", "second"), f"{let}: lanes are read apart")
        check(bool(names) and all(a in defined for a in names), f"{let} uses what is not defined before it")
        odd = [a for a in let.args if not isinstance(a, str) and (type(a) is not float or a != a)]
        check(not odd, f"{let}: literals are Python floats, not {odd}")
        defined.add(let.name)
    for write in part.writes:
        check(write.value in part.tiles, f"{write.value!r} leaves the sweep but is not a tile")
        check(0 <= write.output < len(sweep.outputs), f"output {write.output} of {len(sweep.outputs)}")
        check(write.lane is None or (write.lane in (0, 1) and part.half > 0), f"{write} where there are no halves")
