"""Casts to 8 bits that become passes: which do, and that each bit is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, run
from evaluate import strict_reference
from float8_layers import E4M3, E5M2, Linear, Scaled, by_row
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.elementwise import Pass, write_passes
from coda_inductor.patterns import graph as g
from coda_inductor.write.verifying import Before

M, N = 48, 64
BOTH = [("e4m3", False), ("e4m3", True)]
OPTIONS: dict[str, Any] = REFERENCE | {"strict": True}
Found = tuple[Tensor, ...]


def turned(x: Tensor) -> Tensor:
    return x.t().contiguous()


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def rows_and_columns(x: Tensor) -> Found:
    rows, columns = Scaled(x, -1), Scaled(x, 0)
    return rows.data, turned(columns.data), rows.scale, columns.scale


def one_scale(x: Tensor) -> Found:
    both = Scaled(x, None, E5M2, power=False)
    return both.data, turned(both.data), both.scale


def two_scales(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    """One of which is of more than 8 bits, so that it saturates."""
    return cast(x, rows[:, None]), turned(cast(x, columns)), turned(cast(x, columns, E5M2))


def normalised(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    """In float32, rounded to bfloat16 before it is cast. The largest of rows and columns are of what is rounded."""
    return rows_and_columns((x.float() * rows[:, None] * columns + columns).bfloat16())


def three_dimensions(x: Tensor) -> Found:
    x = torch.sin(x).view(3, M // 3, N)
    rows = Scaled(x, -1)
    columns = Scaled(x.reshape(-1, N), 0)
    return rows.data, turned(columns.data), rows.scale


def transposed_source(x: Tensor) -> Found:
    """The tensor lies by columns, and what is made of it as it does unless it is copied."""
    x = torch.sin(x)
    return Scaled(x, -1).data.contiguous(), turned(Scaled(x, 0).data)


def of_two(x: Tensor) -> Found:
    """A product of two tensors is rounded: it is one tensor itself."""
    return rows_and_columns(torch.sin(x) * torch.cos(x))


def of_one_twice(x: Tensor) -> Found:
    h = torch.sin(x)
    return rows_and_columns((h.float() * h.float().abs()).bfloat16())


def two_tensors(x: Tensor) -> Found:
    return (*rows_and_columns(torch.sin(x)), *rows_and_columns(torch.cos(x)))


def transposed_view(x: Tensor) -> Found:
    """What nobody copies lies as it did: in rows."""
    both = Scaled(x, None)
    return both.data, both.data.t()


def other_orders(x: Tensor) -> Found:
    """Copies of no transpose of two dimensions: these stay what they are."""
    x = torch.sin(x).view(16, M // 16, N)
    data = Scaled(x, None).data
    return data.transpose(0, 1).contiguous(), data.permute(2, 1, 0).contiguous()


def other_orders_too(x: Tensor) -> Found:
    """Beside one of the transpose, which is taken."""
    return (*three_dimensions(x), *other_orders(x))


def only_rows(x: Tensor) -> Found:
    return Scaled(x, -1).data, Scaled(x, None).data


def of_several(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    """Which were never rounded."""
    wide = torch.sin(x).float() * torch.cos(x).float()
    return cast(wide, rows[:, None]), turned(cast(wide, columns))


def written_between(x: Tensor) -> Found:
    """Two tensors, of which the second becomes the input."""
    first = Scaled(x, -1).data
    x.mul_(2)
    return first, turned(Scaled(x, 0).data)


def written_after(x: Tensor) -> Found:
    found = rows_and_columns(x)
    x.mul_(2)
    return found


def odd_rows(x: Tensor) -> Found:
    """Rows of 40 bytes, transposed."""
    return rows_and_columns(torch.sin(x[:40]))


def odd_columns(x: Tensor) -> Found:
    return rows_and_columns(torch.sin(x[:, :40]))


def of_a_sum(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    """With a factor of the second."""
    h = torch.add(torch.sin(x).float(), columns, alpha=2)
    return cast(h, rows[:, None]), turned(cast(h, columns))


def in_float64(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    h = torch.sin(x).double() + 1e9 - 1e9
    return cast(h, rows[:, None]), turned((h * columns).to(E4M3))


def by_vectors_of_float64(x: Tensor, rows: Tensor, columns: Tensor) -> Found:
    h = torch.sin(x).float() + (rows.double() + 1e9)[:, None] - 1e9
    return h.to(E4M3), turned((h * columns).to(E4M3))


def of_eight_bits(x: Tensor) -> Found:
    """Cast twice."""
    h = torch.sin(x).to(E4M3).float()
    return h.to(E5M2), turned(h.to(E5M2))


# what the passes leave
CASES: dict[Callable[..., Found], list[list[tuple[str, bool]]]] = {
    rows_and_columns: [BOTH],
    one_scale: [[("e5m2", False), ("e5m2", True)]],
    two_scales: [[*BOTH, ("e5m2", True)]],
    normalised: [BOTH],
    three_dimensions: [BOTH],
    transposed_source: [BOTH],
    of_two: [BOTH],
    of_one_twice: [BOTH],
    two_tensors: [BOTH, BOTH],
    transposed_view: [],
    other_orders: [],
    other_orders_too: [BOTH],
    only_rows: [],
    of_several: [],
    written_between: [BOTH[1:]],
    written_after: [BOTH],
    odd_rows: [],
    odd_columns: [],
}


LARGEST = {
    rows_and_columns, normalised, three_dimensions, transposed_source, of_two, of_one_twice, two_tensors,
    other_orders_too, written_after, odd_rows, odd_columns,
}  # fmt: skip
"""Of which one pass, or one for each tensor, takes the largest of rows and of columns."""


def given(f: Callable[..., Found], odd: bool) -> list[Tensor]:
    """x, and vectors where the function reads some; `odd`: zeros, NaN, infinities, and scales that saturate."""
    torch.manual_seed(0)
    x, rows, columns = torch.randn(M, N).bfloat16(), torch.rand(M) + 0.5, torch.rand(N) + 0.5
    if odd:
        x[0], x[:, 2], x[3], x[4, 4], x[5, 5] = 0, 0, float("nan"), float("inf"), -float("inf")
        x[6], rows[7], columns[8], columns[9] = torch.finfo(torch.bfloat16).max, 1e6, 1e30, 0
    return [turned(x).t() if f is transposed_source else x, rows, columns][: f.__code__.co_argcount]


def bits(x: Tensor) -> Tensor:
    """As integers; NaN is one, whatever its sign."""
    whole = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    return whole.masked_fill(x.float().isnan(), 0x7F)


def beside_a_product(f: Callable[..., Found]) -> Callable[..., Found]:
    """Of a graph without products nothing is rewritten."""
    return lambda w, *args: (w @ w, *f(*args))


def passes_of(f: Callable[..., Found], *args: Tensor) -> tuple[Found, tuple[Pass, ...]]:
    """What f returns, compiled, and the passes of its one graph."""
    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        _, *found = torch.compile(beside_a_product(f), backend="coda", options=OPTIONS)(torch.ones(4, 4), *args)
    (report,) = REPORTS
    return tuple(found), report.elementwise


def of_largest(made: Pass) -> bool:
    """Does the pass take the largest of rows and columns?"""
    return all(out.over for out in made.record.outputs)


@pytest.mark.sampled
@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_bits_are_eagers(f: Callable[..., Found], odd: bool) -> None:
    inputs = given(f, odd)
    copies = [x.clone() for x in inputs]  # which lie as they do
    found, passes = passes_of(f, *inputs)
    made = [sorted((out.dtype, out.transposed) for out in p.record.outputs) for p in passes if not of_largest(p)]
    assert made == CASES[f]
    largest = [sorted(out.over for out in p.record.outputs) for p in passes if of_largest(p)]
    assert all(over in (["M", "N"], ["M", "M", "N", "N"]) for over in largest)
    assert len(largest) == (0 if f not in LARGEST else len(CASES[f]) or 1)
    for mine, theirs in zip((*found, *inputs), (*f(*copies), *copies), strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("f", [of_a_sum, in_float64, by_vectors_of_float64, of_eight_bits], ids=lambda f: f.__name__)
def test_what_no_record_says_is_eagers(f: Callable[..., Found]) -> None:
    """Whether or not there is a pass."""
    inputs = given(f, False)
    found, _ = passes_of(f, *inputs)
    assert all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in zip(found, f(*inputs), strict=True))


def test_values_are_made_as_they_are_written() -> None:
    """Each rounding, and a value that two casts read once."""
    made, largest = passes_of(normalised, *given(normalised, False))[1]
    assert [let.op for let in largest.record.lets] == ["mul", "mul", "add", "bf16"]
    record = made.record
    assert [o.extent for o in record.operands[:3]] == ["tile", "token", "feature"]
    ops = [let.op for let in record.lets]
    assert ops[:4] == ["mul", "mul", "add", "bf16"] and ops[4:] == ["mul", "max", "min"] * 2
    assert (made.m, record.n) == (str(M), N)


def smoothed(x: Tensor) -> Found:
    """The largest of rows is taken of what was divided by the largest of columns, as SmoothQuant does."""
    s = x.abs().amax(0).clamp(min=1e-5).sqrt()
    y = x / s
    return s, y.abs().amax(1, keepdim=True)


def of_its_own_rows(x: Tensor) -> Found:
    s = torch.sin(x).abs().amax(1, keepdim=True)
    return s, (torch.sin(x) * s.reciprocal()).abs().amax(0)


def of_each_others_rows(x: Tensor) -> Found:
    y = torch.sin(x)
    of_x, of_y = x.abs().amax(1, keepdim=True), y.abs().amax(1, keepdim=True)
    return (x * of_y).abs().amax(0), (y * of_x).abs().amax(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("f", [smoothed, of_its_own_rows, of_each_others_rows])
def test_no_pass_reads_what_it_makes(f: Callable[..., Found], dtype: torch.dtype) -> None:
    """Nor do two read what the other makes."""
    x = given(rows_and_columns, False)[0].to(dtype)
    found, passes = passes_of(f, x)
    assert not passes
    assert all(
        torch.allclose(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5) for a, b in zip(found, f(x), strict=True)
    )


@pytest.mark.usefixtures("uncached")
def test_it_is_run_by_inductor() -> None:
    """On the reference target, by a fallback."""
    x = given(rows_and_columns, False)[0]
    ran = run(beside_a_product(rows_and_columns), torch.ones(4, 4), x, options=OPTIONS)
    assert [len(report.elementwise) for report in ran.reports] == [2]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ran.output[1:], rows_and_columns(x), strict=True))


def saved(out: Tensor) -> tuple[Tensor, ...]:
    """What is kept for the backward."""
    found: Any = out.grad_fn
    return found.saved_tensors  # type: ignore[no-any-return]


@by_row
def test_what_the_backward_casts_is_cast_in_the_forward() -> None:
    """What is kept for it is of 8 bits, and transposed."""
    model = Linear(N, 96, bias=False).bfloat16()

    def f(x: Tensor) -> Tensor:
        return model(torch.sin(x))  # type: ignore[no-any-return]

    x = given(rows_and_columns, False)[0]
    with strict_reference(run=False):
        REPORTS.clear()
        out = torch.compile(f, backend="coda", options=OPTIONS)(x)
    (report,) = REPORTS
    assert sorted((o.dtype, o.transposed) for o in report.elementwise[0].record.outputs) == BOTH
    kept = saved(out)
    assert [(t.shape, t.dtype) for t in kept if t.numel() == M * N] == [((N, M), E4M3)]
    grad = torch.randn_like(out)
    (mine,), (theirs,) = (torch.autograd.grad(y, model.weight, grad) for y in (out, f(x)))
    assert torch.equal(mine, theirs)


@by_row
def test_nothing_more_is_kept_of_what_the_backward_reads_anyway() -> None:
    """The product with a gain reads it: what the backward multiplies of it is cast there."""
    model, gain = Linear(N, N, bias=False).bfloat16(), torch.ones(N, requires_grad=True, dtype=torch.bfloat16)

    def f(x: Tensor) -> Tensor:
        h = torch.sin(x)
        return model(h) + h * gain  # type: ignore[no-any-return]

    x = given(rows_and_columns, False)[0]
    with strict_reference(run=False):
        REPORTS.clear()
        out = torch.compile(f, backend="coda", options=OPTIONS)(x)
    (report,) = REPORTS
    made = [sorted((o.dtype, o.transposed) for o in p.record.outputs) for p in report.elementwise]
    assert BOTH[1:] in made and not [t for t in saved(out) if t.numel() == M * N and t.dtype == E4M3]
    grad = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad(y, (model.weight, gain), grad) for y in (out, f(x)))
    assert torch.equal(mine[0], theirs[0])


@pytest.mark.parametrize("late", [False, True])
def test_what_a_hoisted_pass_reads_is_no_longer_the_backwards(late: bool) -> None:
    """With a tensor of the forward; with one of the backward it stays."""

    def f(x: Tensor) -> Found:
        h = torch.sin(x)
        return rows_and_columns(h)

    module = make_fx(f, select_decomp_table(), tracing_mode="fake")(given(f, False)[0])
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in nodes if late else nodes[len(nodes) // 2 :]:
        node.meta["partitioner_tag"] = "is_backward"
    assert len(write_passes(module.graph, "reference", Before.of(module.graph))[0]) == 1
    (made,) = module.graph.find_nodes(op="call_function", target=ELEMENTWISE)
    assert [g.is_backward(n) for n in g.reached([made], lambda n: n.all_input_nodes) if n is made] == [late]
    assert late or not any(map(g.is_backward, g.reached([made], lambda n: n.all_input_nodes)))


@by_row
def test_a_weight_is_cast_where_it_is_read() -> None:
    """Nothing of it is kept but the largest of its columns: it is there in the backward, too."""
    model = Linear(N, 96, bias=False).bfloat16()
    x = given(rows_and_columns, False)[0].requires_grad_()
    with strict_reference(run=False):
        REPORTS.clear()
        out = torch.compile(model, backend="coda", options=OPTIONS)(F.relu(x))
    (report,) = REPORTS
    of_weight = [p.record for p in report.elementwise if (p.m, p.record.n) == ("96", N)]
    casts, largest = ([(o.dtype, o.transposed, o.over) for o in record.outputs] for record in of_weight)
    assert casts == [("e4m3", True, "")] and largest == [("f32", False, "N"), ("f32", False, "M")]
    assert not [t for t in saved(out) if t.numel() == 96 * N and t.dtype == E4M3]


@pytest.mark.parametrize("written", [False, True])
def test_memory_that_is_overwritten_in_between_is_left(written: bool) -> None:
    """Of a graph that writes in its middle, as chained passes may leave."""

    def f(x: Tensor) -> Found:
        rows, columns = Scaled(x, -1), turned(Scaled(x, 0).data)
        if written:
            x.mul_(2)
        return rows.data, columns, rows.scale, turned(Scaled(x, 0).data)

    x = given(f, False)[0]
    module = make_fx(f, select_decomp_table(), tracing_mode="fake")(x.clone())
    made, _ = write_passes(module.graph, "reference", Before.of(module.graph))
    assert len(made) == (not written)
    module.recompile()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(module(x.clone()), f(x), strict=True))
