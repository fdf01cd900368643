"""The Region: every operation against plain Python, every complaint of the verifier, its text, and what it computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from coda_inductor.core.dtypes import DTYPE_NAMES, DTYPES
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.ops import OF_PAIRS, OPS, OVER_HEAD, at_zero
from coda_inductor.core.region import Let, Operand, Product, Reduction, Region, Store, parse
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify

ON_NUMBERS = [op for op in OPS if op not in (*OF_PAIRS, OVER_HEAD)]
each_op = pytest.mark.parametrize("op", ON_NUMBERS)


def bf16(x: float) -> float:
    """x rounded to the nearest bfloat16, ties to even, on the bits of its float32 (x is exact in float32)."""
    bits = int.from_bytes(struct.pack(">f", x), "big")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack(">f", bits.to_bytes(4, "big"))[0])


PLAIN: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "rcp": lambda a: 1 / a,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1 / math.sqrt(a),
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
    "abs": abs,
    "max": max,
    "min": min,
    "bf16": bf16,
    "if_positive": lambda c, x, y: x if c > 0 else y,
    "if_nonpositive": lambda c, x, y: x if c <= 0 else y,
    "if_negative": lambda c, x, y: x if c < 0 else y,
    "if_nonnegative": lambda c, x, y: x if c >= 0 else y,
    "scaled": lambda a, b, c: a * b * c,
    "f16": lambda a: float(struct.unpack("e", struct.pack("e", a))[0]),
}
"""What each operation means, without torch. A new row of OPS needs one here."""

POINTS = [-3.0, -1.00390625, -0.3330078125, 0.4169921875, 1.001953125, 1.00390625, 2.0, 7.5]  # ties of bf16 among them


def points(op: str) -> list[tuple[float, ...]]:
    xs = [abs(x) for x in POINTS] if OPS[op].positive else POINTS
    return list(itertools.product(xs, repeat=OPS[op].arity))


def test_every_operation_has_a_meaning_without_torch() -> None:
    assert PLAIN.keys() == {*ON_NUMBERS}
    pairs = torch.arange(6.0).view(1, 3, 2)
    assert [OPS[op].torch(pairs).tolist() for op in OF_PAIRS] == [[[0.0, 2.0, 4.0]], [[1.0, 3.0, 5.0]]]


@each_op
def test_operation_means_what_plain_python_says(op: str) -> None:
    given_ = points(op)
    expected = torch.tensor([PLAIN[op](*xs) for xs in given_], dtype=torch.float64)
    columns = torch.tensor(given_, dtype=torch.float64).unbind(1)
    result = OPS[op].torch(*columns)
    assert result.dtype == torch.float64
    assert_close(result, expected, rtol=1e-14, atol=1e-15)
    assert OPS[op].torch(*(c.float() for c in columns)).dtype == torch.float32


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].arity == 2])
def test_operation_takes_a_literal_in_either_place(op: str) -> None:
    x = torch.tensor(POINTS, dtype=torch.float64)
    for literal in (-0.5, 0.0, 2.0):
        expected = [[PLAIN[op](v, literal) for v in POINTS], [PLAIN[op](literal, v) for v in POINTS]]
        assert_close(
            torch.stack([OPS[op].torch(x, literal), OPS[op].torch(literal, x)]), torch.tensor(expected).double()
        )


@each_op
def test_at_zero_is_the_value_at_zero(op: str) -> None:
    row = OPS[op]
    assert at_zero(op, (0.0,) * row.arity) == row.at_zero
    try:
        assert PLAIN[op](*(0.0,) * row.arity) == row.at_zero
    except (ZeroDivisionError, ValueError):
        assert row.at_zero is None


@each_op
def test_at_zero_of_the_unknown_is_unknown(op: str) -> None:
    """Also for a product with 0: the unknown may be infinite."""
    assert at_zero(op, (None, 0.0)[: OPS[op].arity]) is None


@each_op
def test_device_spelling_takes_each_argument(op: str) -> None:
    row = OPS[op]
    spelled = row.cute.format(*(f"<{i}>" for i in range(row.arity)))
    assert all(f"<{i}>" in spelled for i in range(row.arity)) and spelled.count("(") == spelled.count(")")


GATED = Region(
    n=24,
    dtype="bf16",
    products=(Product("gate", 0, 1, 16, "nk"), Product("up", 0, 2, 16, "nk")),
    operands=(Operand("r", "token", "f32"), Operand("bias", "feature", "bf16"), Operand("x", "tile", "bf16")),
    lets=(
        Let("r2", "mul", ("r", 0.5)),
        Let("g", "mul", ("gate", "r2")),
        Let("u", "mul", ("up", "r2")),
        Let("s", "sigmoid", ("g",)),
        Let("silu", "mul", ("g", "s")),
        Let("h", "mul", ("silu", "u")),
        Let("hb", "add", ("h", "bias")),
        Let("y", "add", ("hb", "x")),
        Let("y2", "mul", ("y", "y")),
    ),
    stores=(Store("y", "bf16"), Store("g", "f32")),
    reductions=(Reduction("y2"),),
)
"""SwiGLU of a deferred norm, with bias and residual, and the next norm's sum of squares."""


def gated_inputs(m: int = 10) -> list[Tensor]:
    shapes = [(m, 16), (24, 16), (24, 16), (m,), (24,), (m, 24)]
    dtypes = [torch.bfloat16] * 3 + [torch.float32] + [torch.bfloat16] * 2
    return [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]


def gated_by_hand(inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, N], g [M, N] and the sum of y*y [M] in float64, with no operation of the package."""
    a, wg, wu, r, bias, x = (t.double() for t in inputs)
    g = (a @ wg.T) * (r / 2)[:, None]
    y = g / (1 + torch.exp(-g)) * (a @ wu.T) * (r / 2)[:, None] + bias + x
    return y, g, (y**2).sum(1)


def test_interpreter_rounds_only_where_it_stores() -> None:
    inputs = gated_inputs()
    y, g, total = interpret(verify(GATED), inputs)
    y64, g64, total64 = gated_by_hand(inputs)
    assert [t.dtype for t in (y, g, total)] == [torch.bfloat16, torch.float32, torch.float32]
    assert_close(g.double(), g64, rtol=1e-5, atol=1e-5)
    assert_close(y.double(), y64, rtol=2**-8, atol=1e-5)  # one rounding to bf16
    assert_close(total.double(), total64, rtol=1e-5, atol=1e-5)  # of the value before that rounding
    assert all(t.is_contiguous() for t in (y, g, total))


def test_interpreter_is_exact_in_float64() -> None:
    exact = dataclasses.replace(GATED, dtype="f64", stores=(Store("y", "f64"), Store("g", "f64")))
    inputs = [t.double() for t in gated_inputs()]
    for found, expected in zip(interpret(verify(exact), inputs), gated_by_hand(inputs), strict=True):
        assert found.dtype == torch.float64
        assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_interpreter_knows_both_layouts_and_sums_products() -> None:
    region = Region(
        n=5,
        dtype="f64",
        products=(Product("p", 0, 1, 3, "nk"), Product("q", 2, 3, 4, "kn")),
        operands=(),
        lets=(Let("s", "add", ("p", "q")), Let("d", "sub", (1.0, "s"))),
        stores=(Store("d", "f64"),),
        reductions=(Reduction("s"),),
    )
    a, b, c, d = (torch.randn(s, dtype=torch.float64) for s in [(7, 3), (5, 3), (7, 4), (4, 5)])
    difference, total = interpret(verify(region), [a, b, c, d])
    by_hand = torch.einsum("mk,nk->mn", a, b) + torch.einsum("mk,kn->mn", c, d)
    assert_close(difference, 1 - by_hand)
    assert_close(total, by_hand.sum(1))


def test_interpreter_keeps_named_roundings() -> None:
    region = dataclasses.replace(
        GATED,
        lets=(Let("b", "bf16", ("gate",)), Let("y", "mul", ("b", 3.0))),
        stores=(Store("y", "f32"),),
        reductions=(),
    )
    inputs = gated_inputs()
    rounded = (inputs[0].float() @ inputs[1].float().T).bfloat16().float()
    assert torch.equal(interpret(region, inputs)[0], rounded * 3)


def test_interpreter_stores_contiguous_tiles() -> None:
    inputs = gated_inputs()
    inputs[5] = inputs[5].t().contiguous().t()
    (stored,) = interpret(verify(changed(stores=(Store("x", "bf16"),), reductions=())), inputs)
    assert torch.equal(stored, inputs[5]) and stored.is_contiguous()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_interpreter_returns_memory_of_its_own(dtype: str) -> None:
    """Neither an input nor one value twice, whatever the dtypes: callers may write into results."""
    region = changed(
        dtype=dtype,
        operands=(Operand("x", "tile", dtype),),
        lets=(),
        stores=(Store("x", dtype), Store("x", dtype), Store("gate", dtype), Store("gate", dtype)),
    )
    inputs = [torch.randn(s, dtype=DTYPES[dtype]) for s in [(1, 16), (24, 16), (24, 16), (1, 24)]]
    region = dataclasses.replace(region, reductions=(Reduction("x"), Reduction("x")))
    results = interpret(verify(region), inputs)
    memory = [t.untyped_storage().data_ptr() for t in inputs + results]
    assert len(set(memory)) == len(memory)
    assert torch.equal(results[0], inputs[3]) and torch.equal(results[1], inputs[3])


def test_interpreter_wants_every_operand() -> None:
    with pytest.raises(ValueError):
        interpret(GATED, gated_inputs()[:-1])


def changed(**fields: Any) -> Region:
    return dataclasses.replace(GATED, **fields)


def with_let(*lets: Let) -> Region:
    return changed(lets=GATED.lets + lets)


MALFORMED: list[tuple[str, Region, str]] = [
    ("no product", changed(products=()), "no product"),
    ("no result", changed(stores=(), reductions=()), "nothing leaves it"),
    ("n", changed(n=0), "n=0, k=[16, 16]"),
    ("k", changed(products=(Product("gate", 0, 1, 0, "nk"), GATED.products[1])), "n=24, k=[0, 16]"),
    ("gap", changed(products=(GATED.products[0], Product("up", 0, 3, 16, "nk"))), "matrices [0, 1, 3] are not 0..3"),
    ("square", changed(products=(GATED.products[0], Product("up", 2, 2, 16, "nk"))), "a matrix multiplied by itself"),
    (
        "shared a",
        changed(products=(GATED.products[0], Product("up", 0, 2, 32, "nk"))),
        "share a matrix contract [16, 32]",
    ),
    ("shared b", changed(products=(Product("p", 0, 2, 16, "nk"), Product("q", 1, 2, 8, "nk"))), "contract [8, 16]"),
    ("a sum of one product", changed(products=(Product("gate", 0, 1, 16, "nk", (0, 2)),)), "a sum of products of"),
    ("squares summed", changed(products=(Product("gate", 0, 1, 16, "nk", (2, 2)),)), "a matrix multiplied by itself"),
    (
        "a sum and another",
        changed(products=(Product("gate", 0, 1, 16, "nk", (2, 3)), Product("up", 0, 4, 16, "nk"))),
        "2 products in a tile that sums two",
    ),
    ("layout", changed(products=(Product("gate", 0, 1, 16, "kk"),)), "layout 'kk' of gate's weight"),  # type: ignore[arg-type]
    ("axis", changed(reductions=(Reduction("y2", "K"),)), "reductions [('sum', 'K')] that no epilogue takes"),  # type: ignore[arg-type]
    ("dtype", changed(dtype="fp8"), "dtype 'fp8' is none of bf16, f16, f32, f64"),
    ("operand dtype", changed(operands=(*GATED.operands, Operand("o", "tile", "i8"))), "dtype 'i8'"),
    ("store dtype", changed(stores=(Store("y", "float"),)), "dtype 'float'"),
    ("product name", changed(products=(GATED.products[0], Product("gate", 0, 2, 16, "nk"))), "name 'gate' is taken"),
    ("operand name", changed(operands=(*GATED.operands, Operand("up", "tile", "f32"))), "name 'up' is taken"),
    (
        "identifier",
        changed(operands=(*GATED.operands, Operand("a b", "tile", "f32"))),
        "name 'a b' is taken or no ident",
    ),
    ("extent", changed(operands=(*GATED.operands, Operand("o", "scalar", "f32"))), "extent 'scalar' of o"),
    (
        "product keyword",
        changed(products=(GATED.products[0], Product("in", 0, 2, 16, "nk"))),
        "name 'in' is taken or no",
    ),
    ("let keyword", with_let(Let("lambda", "neg", ("y",))), "name 'lambda' is taken or no identifier"),
    ("integer", with_let(Let("z", "mul", ("y", 2))), "literals are Python floats, not [2]"),
    ("boolean", with_let(Let("z", "mul", ("y", True))), "literals are Python floats, not [True]"),
    ("not a number", with_let(Let("z", "mul", (math.nan, "y"))), "literals are Python floats, not [nan]"),
    ("let name", with_let(Let("y", "neg", ("y",))), "name 'y' is taken"),
    ("let identifier", with_let(Let("3", "neg", ("y",))), "name '3' is taken or no identifier"),
    ("operation", with_let(Let("z", "gamma", ("y",))), "unknown operation 'gamma'"),
    ("arity", with_let(Let("z", "mul", ("y",))), "mul takes 2 arguments, found 1"),
    ("constant", with_let(Let("z", "mul", (1.0, 2.0))), "z is a constant"),
    ("undefined", with_let(Let("z", "mul", ("y", "w"))), "uses what is not defined before it"),
    ("order", changed(lets=GATED.lets[::-1]), "uses what is not defined before it"),
    ("stores nothing", changed(stores=(Store("w", "f32"),)), "'w' leaves the region but is not a tile"),
    ("stores a vector", changed(stores=(Store("r2", "f32"),)), "'r2' leaves the region but is not a tile"),
    ("sums a vector", changed(reductions=(Reduction("bias"),)), "'bias' leaves the region but is not a tile"),
]


def test_verifier_returns_what_is_well_formed() -> None:
    assert verify(GATED) is GATED


@pytest.mark.parametrize(("region", "complaint"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_verifier_complains(region: Region, complaint: str) -> None:
    with pytest.raises(BrokenInvariant) as caught:
        verify(region)
    assert complaint in str(caught.value)
    assert region.digest in str(caught.value)


def test_errors_say_what_where_and_what_to_do() -> None:
    error = Unsupported("strides (1, 4096)", where="model.py:41", hint="call .contiguous()")
    assert str(error) == "model.py:41: strides (1, 4096) (call .contiguous())"
    assert (error.what, error.where, error.hint) == ("strides (1, 4096)", "model.py:41", "call .contiguous()")
    assert str(BrokenInvariant("no product")) == "no product"


def test_region_reads_as_a_program() -> None:
    assert show(dataclasses.replace(GATED, lets=GATED.lets[:4], stores=(Store("g", "f32"),)), "T").splitlines() == [
        "gate[T, 24] = in0 @ in1.T  (K=16, bf16)",
        "up[T, 24] = in0 @ in2.T  (K=16, bf16)",
        "load r[T] = in3  (f32, per token)",
        "load bias[24] = in4  (bf16, per feature)",
        "load x[T, 24] = in5  (bf16, per tile)",
        "r2 = r * 0.5",
        "g = gate * r2",
        "u = up * r2",
        "s = sigmoid(g)",
        "store g[T, 24]  (f32)",
        "sum over N of y2 -> [T]",
    ]


def test_dtype_names() -> None:
    assert {DTYPES[name]: name for name in DTYPES} == DTYPE_NAMES
    assert GATED.compute == torch.float32 and changed(dtype="f64").compute == torch.float64


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Region)])
def test_digest_depends_on_every_field(field: str) -> None:
    value = getattr(GATED, field)
    others = {"dtype": "f16", "right": "f16", "fast": True, "neighbours": True, "adds": True}
    other = value + 1 if field in ("n", "half") else others[field] if field in others else value[:-1]
    assert changed(**{field: other}).digest != GATED.digest
    assert changed().digest == GATED.digest and len(GATED.digest) == 16


NUMBERS = st.floats(allow_nan=False, width=32)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """A well-formed Region of a few products, operands and statements of any operation."""
    layouts = draw(st.lists(st.sampled_from(["nk", "kn"]), min_size=1, max_size=3))
    products = tuple(Product(f"acc{i}", 0, i + 1, 4, layout) for i, layout in enumerate(layouts))  # type: ignore[arg-type]
    kinds = draw(st.lists(st.sampled_from(["token", "feature", "tile"]), max_size=3))
    dtypes = st.sampled_from(list(DTYPES))
    operands = tuple(Operand(f"x{i}", kind, draw(dtypes)) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    names = [p.name for p in products] + [o.name for o in operands]
    tiles = [p.name for p in products] + [o.name for o in operands if o.extent == "tile"]
    lets: list[Let] = []
    for op in draw(st.lists(st.sampled_from(ON_NUMBERS), max_size=6)):
        args: list[str | float] = [draw(st.sampled_from(names))]
        for _ in range(1, OPS[op].arity):
            args.insert(draw(st.integers(0, 1)), draw(st.sampled_from(names) | NUMBERS))
        let = Let(f"v{len(lets)}", op, tuple(args))
        lets.append(let)
        names.append(let.name)
        if any(a in tiles for a in let.args):
            tiles.append(let.name)
    tile = st.sampled_from(tiles)
    stores = tuple(draw(st.lists(st.builds(Store, tile, dtypes), min_size=1, max_size=3)))
    reductions = tuple(draw(st.lists(st.builds(Reduction, tile, st.sampled_from(("N", "M"))), max_size=2)))
    return Region(6, draw(dtypes), products, operands, tuple(lets), stores, reductions)


@given(regions())
def test_parse_is_the_inverse_of_text(region: Region) -> None:
    again = parse(verify(region).text)
    assert again == region
    assert (again.text, again.digest, hash(again)) == (region.text, region.digest, hash(region))


@given(regions(), st.integers(0, 3))
def test_every_region_runs(region: Region, m: int) -> None:
    """Any M, none included; the results have the shapes and dtypes that the record says."""
    matrices = [torch.randn(m, 4)] + [torch.randn((6, 4) if p.b_layout == "nk" else (4, 6)) for p in region.products]
    shapes = {"token": (m,), "feature": (6,), "tile": (m, 6)}
    operands = [torch.randn(shapes[o.extent]).to(DTYPES[o.dtype]) for o in region.operands]
    results = interpret(region, [t.to(DTYPES[region.dtype]) for t in matrices] + operands)
    assert [(r.shape, r.dtype) for r in results] == [((m, 6), DTYPES[s.dtype]) for s in region.stores] + [
        ((m if r.over == "N" else 6,), region.compute) for r in region.reductions
    ]
    assert len(show(region).splitlines()) == sum(
        len(part) for part in (region.products, region.operands, region.lets, region.stores, region.reductions)
    )
