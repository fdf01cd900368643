"""The text of elementwise passes, run on torch tensors as Triton would run it, against the interpreter."""

from __future__ import annotations

import re
import types
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coda_inductor.codegen.source import module_name
from coda_inductor.codegen.triton_source import render
from coda_inductor.core.dtypes import DTYPES, FORMATS
from coda_inductor.core.elementwise import EXPONENTIALS, LARGEST, MAXIMUM, Elementwise, Output, interpret, verify
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import Let, Operand

COMPUTED = [name for name, op in OPS.items() if op.triton]
BLOCK_M, BLOCK_N = 16, 32
INF = float("inf")
SIZES = [(1, 16), (16, 32), (17, 48), (37, 80), (64, 16)]  # all but one end within a block


class Pointer(NamedTuple):
    """A tensor's memory, and places in it."""

    memory: Tensor
    written: Tensor
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return self._replace(at=self.at + offset)


def pointer(x: Tensor) -> Pointer:
    assert x.is_contiguous()
    return Pointer(x.view(-1), torch.zeros(x.numel(), dtype=torch.int))


def load(p: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    at = torch.as_tensor(p.at)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    assert not bool((inside & ((at < 0) | (at >= p.memory.numel()))).any()), "reads past the end"
    found = p.memory[torch.where(inside, at, 0)]
    return torch.where(inside, found.double(), other).to(found.dtype)


def store(p: Pointer, value: Tensor, mask: Tensor) -> None:
    assert p.at.shape == value.shape == mask.shape and value.dtype == p.memory.dtype
    at = p.at[mask]
    assert bool(((at >= 0) & (at < p.memory.numel())).all()), "writes past the end"
    p.memory[at] = value[mask]
    p.written.index_add_(0, at, torch.ones_like(at, dtype=torch.int))


def atomic_max(p: Pointer, value: Tensor, mask: Tensor, sem: str) -> None:
    assert p.at.shape == value.shape == mask.shape and value.dtype == p.memory.dtype == torch.int32
    at = p.at[mask]
    assert bool(((at >= 0) & (at < p.memory.numel())).all()), "writes past the end"
    p.memory[at] = torch.maximum(p.memory[at], value[mask])
    p.written[at] = 1


def compared(name: str) -> Any:
    def f(a: Any, b: Any, propagate_nan: str = "") -> Tensor:
        assert propagate_nan in ("all", "")
        of = name if propagate_nan else f"f{name[:3]}"  # which passes over NaN
        found: Tensor = getattr(torch, of)(*(torch.as_tensor(x, dtype=torch.float32) for x in (a, b)))
        return found

    return f


def greatest(x: Tensor, axis: int) -> Tensor:
    """Passes over NaN, as Triton's does."""
    return (x.nan_to_num(-INF, INF, -INF) if x.is_floating_point() else x).amax(axis)


def full(shape: list[int], value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def zeros(shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def standin(program: int) -> dict[str, Any]:
    """The names that a module imports, on torch, for one program of the grid."""
    tl: dict[str, Any] = {row.triton: row.torch for row in FORMATS.values()}
    tl |= {"int64": torch.int64, "constexpr": int, "PropagateNan": types.SimpleNamespace(ALL="all")}
    tl |= {"cdiv": lambda a, b: -(-a // b), "arange": torch.arange, "program_id": lambda axis: torch.tensor(program)}
    tl |= {"load": load, "store": store, "trans": torch.t, "broadcast_to": torch.broadcast_to, "abs": torch.abs}
    tl |= {"max": greatest, "sum": lambda x, axis: x.sum(axis), "exp": torch.exp, "full": full, "zeros": zeros}
    tl |= {"atomic_max": atomic_max, "where": torch.where, "int32": torch.int32}
    tl |= {"cast": lambda x, dtype, bitcast: x.contiguous().view(dtype)}
    tl |= {"maximum": compared("maximum"), "minimum": compared("minimum")}
    modules = {"tl": tl, "libdevice": {"tanh": torch.tanh}}
    made = {name: types.SimpleNamespace(**there) for name, there in modules.items()}
    return made | {"triton": types.SimpleNamespace(jit=lambda f: f)}


def run(record: Elementwise, inputs: list[Tensor], unread: int | None = None, text: str = "") -> list[Tensor | None]:
    """A record's text on torch tensors: each output is written once, all of it."""
    m, text = inputs[record.tile].shape[0], text or render(record)
    integers = [o.taken == LARGEST and bool(o.over) for o in record.outputs]
    poison = [0.0 if integer else float("nan") for integer in integers]
    outs = [
        torch.full(shape, value).to(DTYPES[o.dtype])
        for shape, value, o in zip(record.sizes(m), poison, record.outputs, strict=True)
    ]
    given = [pointer(x) for x in inputs]
    to: list[Pointer | None] = [
        None if i == unread else pointer(out.view(torch.int32) if integer else out)
        for i, (out, integer) in enumerate(zip(outs, integers, strict=True))
    ]
    for program in range(-(-m // BLOCK_M) * (1 if record.along_rows else -(-record.n // BLOCK_N))):
        names = standin(program)
        exec(re.sub(r"^(import|from) triton.*\n", "", text, flags=re.MULTILINE), names)
        names["kernel"](*given, *to, m, record.n, BLOCK_M, BLOCK_N)
    assert all(p is None or bool((p.written == 1).all()) for p in to)
    return [None if p is None else out for p, out in zip(to, outs, strict=True)]


def inputs_of(record: Elementwise, m: int) -> list[Tensor]:
    """With NaN, infinities, zeros and what saturates in the tensor."""
    shapes: dict[str, tuple[int, ...]] = {"tile": (m, record.n), "token": (m,), "feature": (record.n,), "scalar": ()}
    found = [torch.randn(shapes[o.extent]).to(DTYPES[o.dtype]) for o in record.operands]
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e4, -1e4])
    found[0].view(-1)[: len(odd)] = odd.to(found[0].dtype)
    return found


def bits(x: Tensor) -> Tensor:
    """As integers; NaN is one, whatever its sign."""
    whole = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    return whole.masked_fill(x.float().isnan(), 0x7F)


def agree(record: Elementwise, m: int) -> None:
    given = inputs_of(record, m)
    for found, wanted in zip(run(record, given), interpret(record, given), strict=True):
        assert found is not None and found.shape == wanted.shape and torch.equal(bits(found), bits(wanted))


OPERANDS = (
    Operand("x", "tile", "bf16"), Operand("r", "token", "f32"), Operand("c", "feature", "bf16"),
    Operand("g", "scalar", "f32"), Operand("z", "tile", "f32"),
)  # fmt: skip


def casts(n: int) -> Elementwise:
    """A tensor by a vector, rounded; cast in rows, in columns and by one number; vectors; and what it was."""
    lets = [
        Let("xr", "mul", ("x", "r")),
        Let("n", "bf16", ("xr",)),
        Let("nz", "add", ("n", "z")),
        Let("xg", "add", ("x", 9.0)),
    ]
    for name, scale, limit in (("p", "r", 448.0), ("q", "c", 448.0), ("s", "g", 57344.0)):
        lets += [Let(f"{name}0", "mul", ("n", scale)), Let(f"{name}1", "max", (f"{name}0", -limit))]
        lets.append(Let(f"{name}2", "min", (f"{name}1", limit)))
    outputs = [Output("p2", "e4m3"), Output("q2", "e4m3", True), Output("s2", "e5m2"), Output("s2", "e5m2", True)]
    outputs += [Output("nz", "f32", True), Output("n", "bf16"), Output("r", "f32"), Output("c", "f16", True)]
    outputs += [Output("g", "f32"), Output("x", "bf16", True)]
    outputs += [Output(value, "f32", over=over) for value in ("n", "x", "xg") for over in ("N", "M")]
    return verify(Elementwise(n, OPERANDS, tuple(lets), tuple(outputs)))


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_text_means_what_the_record_means(m: int, n: int) -> None:
    agree(casts(n), m)


@pytest.mark.parametrize("op", COMPUTED)
def test_every_operation(op: str) -> None:
    """Of tensors and vectors, and of a literal in either place, infinite ones too."""
    arguments: list[tuple[str | float, ...]] = [(name,) for name in ("x", "r", "c", "g", "z")]
    if OPS[op].arity == 2:
        arguments = [("x", "z"), ("x", "r"), ("c", "x"), ("g", "z"), ("r", "c"), ("x", 0.1), (0.1, "z")]
        arguments += [("x", float("inf")), (-float("inf"), "z")]
    lets = tuple(Let(f"v{i}", op, args) for i, args in enumerate(arguments))
    outputs = tuple(Output(let.name, "f32", bool(i % 2)) for i, let in enumerate(lets))
    agree(verify(Elementwise(48, OPERANDS, lets, outputs)), 37)


@pytest.mark.parametrize("dtype", [name for name in FORMATS if name != "f64"])
def test_every_format(dtype: str) -> None:
    """Read, and written in both layouts."""
    outputs = (Output("x", dtype), Output("x", dtype, True))
    agree(Elementwise(48, (Operand("x", "tile", dtype),), (), outputs), 37)


def test_what_nobody_reads_is_not_written() -> None:
    record = casts(48)
    given = inputs_of(record, 37)
    wanted = interpret(record, given)
    for i in range(len(record.outputs)):
        found = run(record, given, unread=i)
        assert found[i] is None
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine is None or torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize(
    ("guard", "less"),
    [
        ("(m[:, None] < M)", "(m[:, None] < 2 * M)"),
        ("(n[None, :] < N)", "(n[None, :] < 2 * N)"),
        ("mask=m < M", "mask=m < 2 * M"),
        ("mask=n < N", "mask=n < 2 * N"),
    ],
)
def test_the_edge_is_guarded(guard: str, less: str) -> None:
    """With less of a mask something is read or written past the end, or twice."""
    record = casts(48)
    given, text = inputs_of(record, 37), render(record)
    assert guard in text
    with pytest.raises(AssertionError):
        run(record, given, text=text.replace(guard, less))


def test_texts_are_named_by_content() -> None:
    record = casts(48)
    assert render(record) == render(record) == render(replace(record, n=96))  # a kernel serves all sizes
    others = [
        replace(record, outputs=record.outputs[:-1]),
        replace(record, lets=(*record.lets, Let("o", "neg", ("x",)))),
    ]
    assert len({module_name(render(r)) for r in (record, *others)}) == 3
    compile(render(record), "pass", "exec")


SUMS = verify(Elementwise(
    37, (Operand("x", "tile", "bf16"), Operand("r", "token", "f32"), Operand("c", "feature", "f32")),
    (Let("xr", "mul", ("x", "r")), Let("xrc", "add", ("xr", "c"))),
    tuple(Output(v, "f32", False, "N", taken) for v in ("xrc", "x") for taken in (MAXIMUM, EXPONENTIALS)),
))  # fmt: skip
"""Of a tensor by a vector plus another, and of the tensor itself."""


@pytest.mark.parametrize("n", [1, 15, 16, 17, 37])
def test_sums_along_rows(n: int) -> None:
    """One block, a part of one, several; rows of infinities, of -inf alone, and with NaN are as torch has them."""
    record = replace(SUMS, n=n)
    x, r, c = torch.randn(9, n).bfloat16(), torch.rand(9) + 0.5, torch.randn(n)
    x[1], x[2, 0], x[3, -1], x[4, 0], x[5] = -INF, -INF, INF, float("nan"), 0
    x[6, : n // 2] = -INF
    for found, wanted in zip(run(record, [x, r, c]), interpret(record, [x, r, c]), strict=True):
        assert found is not None and torch.allclose(found, wanted, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("unread", range(4))
def test_sums_along_rows_that_nobody_reads(unread: int) -> None:
    given = [torch.randn(9, 37).bfloat16(), torch.rand(9), torch.randn(37)]
    found, wanted = run(SUMS, given, unread), interpret(SUMS, given)
    assert found[unread] is None
    assert all(x is None or torch.allclose(x, y, rtol=1e-6) for x, y in zip(found, wanted, strict=True))
