"""Elementwise passes on a GPU against the interpreter: bit for bit, any M and N, outputs poisoned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.elementwise import EXPONENTIALS, MAXIMUM, PLACED, Elementwise, Output, interpret, verify
from coda_inductor.core.region import Let, Operand
from coda_inductor.kernels.elementwise import triton_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")

INF = float("inf")
SIZES = [(1, 16), (37, 48), (256, 4096), (4097, 176)]


def casts(n: int, dtype: str, largest: float) -> Elementwise:
    """A normalised tensor cast in rows and transposed, each with scales of its own, its own value in 16 bits, and the
    largest of its rows and columns."""
    operands = [Operand("x", "tile", "bf16"), Operand("r", "token", "f32"), Operand("g", "feature", "bf16")]
    operands += [Operand("rows", "token", "f32"), Operand("columns", "feature", "f32"), Operand("one", "scalar", "f32")]
    lets = [Let("a", "mul", ("x", "r")), Let("b", "mul", ("a", "g")), Let("n", "bf16", ("b",))]
    for name, scale in (("p", "rows"), ("q", "columns"), ("s", "one")):
        lets += [Let(f"{name}0", "mul", ("n", scale)), Let(f"{name}1", "max", (f"{name}0", -largest))]
        lets.append(Let(f"{name}2", "min", (f"{name}1", largest)))
    outputs = [Output("p2", dtype), Output("q2", dtype, True), Output("n", "bf16"), Output("s2", dtype, True)]
    outputs += [Output("n", "f32", over="N"), Output("x", "f32", over="M")]
    return verify(Elementwise(n, tuple(operands), tuple(lets), tuple(outputs)))


def given(record: Elementwise, m: int, odd: bool) -> list[Tensor]:
    """Random inputs; `odd`: with zeros, NaN and infinite values, and rows that saturate."""
    shapes = {"tile": (m, record.n), "token": (m,), "feature": (record.n,), "scalar": ()}
    out = [torch.randn(shapes[o.extent], device="cuda").to(DTYPES[o.dtype]) for o in record.operands]
    if odd:
        x = out[0]
        x[0], x[m // 2, 3], x[m // 3, 5], x[-1, 7] = 0.0, float("nan"), float("inf"), -float("inf")
        out[3][::3] = 1e6
    return out


def bits(x: Tensor) -> Tensor:
    """As integers, with one NaN for all."""
    whole = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    return whole.masked_fill(x.float().isnan(), 0)


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize(("dtype", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_kernel_is_the_interpreter(m: int, n: int, dtype: str, largest: float, odd: bool, tmp_path: Path) -> None:
    record = casts(n, dtype, largest)
    tmp_path.chmod(0o700)
    for _ in range(2):  # fresh inputs
        inputs = given(record, m, odd)
        wanted = interpret(record, inputs)
        outs = [torch.full_like(w, float("nan")) for w in wanted]
        triton_kernel(record, str(tmp_path))(inputs, outs)
        for found, expected in zip(outs, wanted, strict=True):
            assert found.shape == expected.shape and found.is_contiguous()
            assert torch.equal(found.float().isnan(), expected.float().isnan())
            assert torch.equal(bits(found), bits(expected))


def test_what_is_not_read_is_not_written(tmp_path: Path) -> None:
    record = casts(64, "e4m3", 448.0)
    tmp_path.chmod(0o700)
    inputs = given(record, 40, False)
    wanted = interpret(record, inputs)
    out = torch.empty_like(wanted[1])
    triton_kernel(record, str(tmp_path))(inputs, [None, out, None, None, None, None])
    assert torch.equal(bits(out), bits(wanted[1]))


@pytest.mark.parametrize("largest", [False, True], ids=["casts", "largest"])
def test_arguments_of_other_kinds(largest: bool, tmp_path: Path) -> None:
    """One kernel is called with other numbers of rows, addresses and unread outputs, each kind again."""
    record = casts(48, "e4m3", 448.0)
    if not largest:
        record = verify(dataclasses.replace(record, outputs=record.outputs[:4]))
    tmp_path.chmod(0o700)
    kernel = triton_kernel(record, str(tmp_path))
    for m, shifted, unread in [(40, 0, 9), (48, 0, 9), (40, 1, 9), (48, 1, 0), (1, 0, 9), (40, 0, 1), (7, 1, 2)] * 2:
        inputs = given(record, m, False)
        x = torch.empty(m * 48 + 8, device="cuda", dtype=torch.bfloat16)[shifted : shifted + m * 48].view(m, 48)
        inputs[0] = x.copy_(inputs[0])
        wanted = interpret(record, inputs)
        outs = [None if i == unread else torch.full_like(w, float("nan")) for i, w in enumerate(wanted)]
        kernel(inputs, outs)
        assert all(out is None or torch.equal(bits(out), bits(w)) for out, w in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize(("m", "n"), [*SIZES, (65, 63), (4097, 1000)])
def test_the_largest_of_rows_and_columns(m: int, n: int, odd: bool, tmp_path: Path) -> None:
    """A kernel of them alone has blocks of its own; and of one of them alone."""
    operands = (Operand("x", "tile", "bf16"), Operand("r", "token", "f32"))
    outputs = (Output("v", "f32", over="N"), Output("v", "f32", over="M"))
    record = verify(Elementwise(n, operands, (Let("v", "mul", ("x", "r")),), outputs))
    tmp_path.chmod(0o700)
    x, r = torch.randn(m, n, device="cuda").bfloat16(), torch.rand(m, device="cuda")
    if odd:
        x[0], x[m // 2, 3], x[m // 3, 5], x[-1, 7] = 0.0, float("nan"), float("inf"), -float("inf")
    wanted = interpret(record, [x, r])
    for unread in (None, 0, 1):
        outs = [None if i == unread else torch.full_like(w, float("nan")) for i, w in enumerate(wanted)]
        triton_kernel(record, str(tmp_path))([x, r], outs)
        assert all(out is None or torch.equal(bits(out), bits(w)) for out, w in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize(("m", "n"), [*SIZES, (65, 63), (37, 4096), (4097, 5003), (9, 128256)])
def test_sums_along_rows(m: int, n: int, odd: bool, tmp_path: Path) -> None:
    """The maximum of each row and the sum of its exponentials, against float64; of one of them alone."""
    operands = (Operand("x", "tile", "bf16"), Operand("r", "token", "f32"))
    outputs = tuple(Output("v", "f32", False, "N", taken) for taken in (MAXIMUM, EXPONENTIALS))
    record = verify(Elementwise(n, operands, (Let("v", "mul", ("x", "r")),), outputs))
    tmp_path.chmod(0o700)
    for _ in range(2):  # fresh inputs
        x, r = torch.randn(m, n, device="cuda").bfloat16(), torch.rand(m, device="cuda") + 0.5
        if odd:
            x[0], x[m // 2, 3], x[m // 3, 5], x[-1, : n - 1], x[m // 4, 7] = 0.0, INF, -INF, -INF, float("nan")
        wanted = interpret(record, [x.double(), r.double()])
        for unread in (None, 0, 1):
            outs = [None if i == unread else torch.full_like(w, float("nan")) for i, w in enumerate(wanted)]
            triton_kernel(record, str(tmp_path))([x, r], outs)
            for out, w in zip(outs, wanted, strict=True):
                assert out is None or torch.allclose(out, w, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("m", "n"), [*SIZES, (5, 50257)])
def test_gradients_of_scores_are_the_interpreters(m: int, n: int, dtype: str, tmp_path: Path) -> None:
    operands = [Operand("x", "tile", dtype), Operand("m", "token", "f32"), Operand("t", "token", "f32")]
    operands.append(Operand("g", "scalar", "f32"))
    lets = [Let("c", "tanh", ("x",)), Let("d", "sub", ("c", "m")), Let("e", "exp", ("d",))]
    lets += [Let("h", PLACED, ("t", -1.0)), Let("p", "add", ("e", "h")), Let("q", "mul", ("p", "g"))]
    record = verify(Elementwise(n, tuple(operands), tuple(lets), (Output("q", dtype),)))
    tmp_path.chmod(0o700)
    for _ in range(2):  # fresh inputs
        x, top, _, number = given(record, m, False)
        target = torch.randint(0, n, (m,), device="cuda").float()
        inputs = [x, top + 4.0, target, number]
        wanted = interpret(record, inputs)
        over, error = x.clone(), 2**-7 if dtype == "bf16" else 1e-6
        for out, *read in ((torch.full_like(wanted[0], float("nan")), x), (over, over)):
            triton_kernel(record, str(tmp_path))([*read, *inputs[1:]], [out])
            torch.testing.assert_close(out, wanted[0], rtol=error, atol=1e-6)
