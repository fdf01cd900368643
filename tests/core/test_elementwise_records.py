"""The record of an elementwise pass: its text, every complaint of its verifier, and what it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.elementwise import EXPONENTIALS, MAXIMUM, Elementwise, Output, interpret, parse, verify
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import Let, Operand

COMPUTED = [name for name, op in OPS.items() if op.triton]
EXTENTS = ("tile", "token", "feature", "scalar")

CASTS = verify(Elementwise(
    24,
    (Operand("x", "tile", "bf16"), Operand("r", "token", "f32"), Operand("c", "feature", "f32"),
     Operand("g", "scalar", "f32")),
    (Let("xr", "mul", ("x", "r")), Let("low", "max", ("xr", -448.0)), Let("high", "min", ("low", 448.0)),
     Let("xc", "mul", ("x", "c")), Let("round", "bf16", ("xc",)), Let("all", "mul", ("round", "g"))),
    (Output("high", "e4m3"), Output("all", "e5m2", True), Output("r", "f32"), Output("x", "bf16", True),
     Output("round", "f32", over="N"), Output("x", "f32", over="M")),
))  # fmt: skip
"""A tensor cast in rows and transposed, by a vector each; a vector, and the tensor as it was; the largest of its rows
and columns."""


def inputs(record: Elementwise, m: int) -> list[Tensor]:
    """About 1 in size."""
    shapes: dict[str, tuple[int, ...]] = {"tile": (m, record.n), "token": (m,), "feature": (record.n,), "scalar": ()}
    return [torch.randn(shapes[o.extent]).to(DTYPES[o.dtype]) for o in record.operands]


ALONG = Output("x", "f32", False, "N", MAXIMUM)


def changed(**fields: Any) -> Elementwise:
    return dataclasses.replace(CASTS, **fields)


def with_let(let: Let) -> Elementwise:
    return changed(lets=(*CASTS.lets, let))


BROKEN: list[tuple[str, Elementwise, str]] = [
    ("no tile", changed(operands=CASTS.operands[1:], lets=(), outputs=CASTS.outputs[2:3]), "no operand [M, N]"),
    ("extent", changed(operands=(*CASTS.operands, Operand("o", "table", "f32"))), "o per table"),
    ("operation", with_let(Let("z", "gamma", ("x",))), "z = gamma('x',)"),
    ("operation of epilogues alone", with_let(Let("z", "erf", ("x",))), "z = erf('x',)"),
    ("a place without a number", with_let(Let("z", "placed", ("x",))), "z = placed('x',)"),
    ("a number for each row", with_let(Let("z", "placed", ("x", "x"))), "z = placed('x', 'x')"),
    ("a place that nobody knows", with_let(Let("z", "placed", ("w", 1.0))), "z = placed('w', 1.0)"),
    ("arity", with_let(Let("z", "mul", ("x",))), "z = mul('x',)"),
    ("undefined", with_let(Let("z", "mul", ("x", "w"))), "z = mul('x', 'w')"),
    ("order", changed(lets=CASTS.lets[::-1]), "high = min('low', 448.0)"),
    ("output", changed(outputs=(Output("w", "e4m3"),)), "w as e4m3"),
    ("largest of nothing", changed(outputs=(Output("x", "f32", over="K"),)), "x as f32, largest over 'K'"),
    ("largest in 16 bits", changed(outputs=(Output("x", "bf16", over="M"),)), "x as bf16, largest over 'M'"),
    ("largest, transposed", changed(outputs=(Output("x", "f32", True, "N"),)), "x as f32, largest over 'N'"),
    (
        "a cast along rows",
        changed(outputs=(Output("x", "f32", False, "N", MAXIMUM), Output("high", "e4m3"))),
        "high as",
    ),
    ("exponentials of columns", changed(outputs=(Output("x", "f32", False, "M", EXPONENTIALS),)), "over 'M'"),
    ("exponentials of all", changed(outputs=(Output("x", "f32", taken=EXPONENTIALS),)), "exponentials over ''"),
    ("no output", changed(outputs=()), "no output, or a name twice"),
    ("a name twice", with_let(Let("x", "neg", ("r",))), "no output, or a name twice"),
    ("an operand twice", changed(operands=(*CASTS.operands, Operand("r", "token", "f32"))), "or a name twice"),
]


@pytest.mark.parametrize(("record", "complaint"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_verifier_complains(record: Elementwise, complaint: str) -> None:
    with pytest.raises(BrokenInvariant) as caught:
        verify(record)
    assert complaint in str(caught.value) and record.digest in str(caught.value)


def test_verifier_returns_what_is_well_formed() -> None:
    assert verify(CASTS) is CASTS


@pytest.mark.parametrize("m", [1, 5])
def test_it_computes_what_torch_does(m: int) -> None:
    x, r, c, g = given_ = inputs(CASTS, m)
    wanted = [
        (x.float() * r[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn),
        ((x.float() * c).bfloat16().float() * g).to(torch.float8_e5m2).t(),
        r[:, None].expand(m, 24),
        x.t(),
        (x.float() * c).bfloat16().float().abs().amax(1),
        x.float().abs().amax(0),
    ]
    for found, value in zip(interpret(CASTS, given_), wanted, strict=True):
        assert found.dtype == value.dtype and found.is_contiguous()
        assert torch.equal(found.float(), value.float())


def test_nan_is_the_largest() -> None:
    x, *rest = inputs(CASTS, 3)
    x[1, 2], x[2, 3] = float("nan"), -float("inf")
    *_, rows, columns = interpret(CASTS, [x, *rest])
    assert rows.isnan().tolist() == [False, True, False] and columns.isnan().nonzero().tolist() == [[2]]
    assert rows[2] == columns[3] == float("inf")


def test_it_returns_memory_of_its_own() -> None:
    record = changed(lets=(), outputs=(Output("x", "bf16"), Output("x", "bf16"), Output("x", "bf16", True)))
    given_ = inputs(record, 24)
    memory = [t.untyped_storage().data_ptr() for t in given_ + interpret(record, given_)]
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Elementwise)])
def test_digest_depends_on_every_field(field: str) -> None:
    value = getattr(CASTS, field)
    assert changed(**{field: value + 16 if field == "n" else value[:-1]}).digest != CASTS.digest
    turned = tuple(dataclasses.replace(out, transposed=not out.transposed) for out in CASTS.outputs)
    assert changed(outputs=turned).digest != CASTS.digest and changed().digest == CASTS.digest


@st.composite
def records(draw: st.DrawFn) -> Elementwise:
    """A well-formed record of any operation that passes compute."""
    dtypes = st.sampled_from([name for name in DTYPES if name != "f64"])
    kinds = ["tile", *draw(st.lists(st.sampled_from(EXTENTS), max_size=3))]
    operands = tuple(Operand(f"x{i}", kind, draw(dtypes)) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    names, lets = [o.name for o in operands], list[Let]()
    for op in draw(st.lists(st.sampled_from(COMPUTED), max_size=6)):
        args: list[str | float] = [draw(st.sampled_from(names))]
        for _ in range(1, OPS[op].arity):
            args.append(draw(st.sampled_from(names) | st.floats(allow_nan=False, width=32)))
        lets.append(Let(f"v{len(lets)}", op, tuple(args)))
        names.append(lets[-1].name)
    outputs = st.builds(Output, st.sampled_from(names), dtypes, st.booleans())
    outputs |= st.builds(Output, st.sampled_from(names), st.just("f32"), st.just(False), st.sampled_from("MN"))
    return Elementwise(6, operands, tuple(lets), tuple(draw(st.lists(outputs, min_size=1, max_size=4))))


@given(records())
def test_parse_is_the_inverse_of_text(record: Elementwise) -> None:
    again = parse(verify(record).text)
    assert again == record
    assert (again.text, again.digest, hash(again)) == (record.text, record.digest, hash(record))


@given(records(), st.integers(1, 3))
def test_every_record_runs(record: Elementwise, m: int) -> None:
    made = interpret(record, inputs(record, m))
    kinds = {"N": (m,), "M": (record.n,)}
    shapes = [kinds.get(out.over, (record.n, m) if out.transposed else (m, record.n)) for out in record.outputs]
    assert record.sizes(m) == shapes
    assert [(x.shape, x.dtype) for x in made] == [
        (shape, DTYPES[out.dtype]) for shape, out in zip(shapes, record.outputs, strict=True)
    ]
