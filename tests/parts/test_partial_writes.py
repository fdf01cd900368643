"""Tensors that the user writes part by part: what becomes one, and that all of it is eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from evaluate import strict_reference
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from coda_inductor.explain.capture import capture
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.parts.written import WRITES, _meet, join_written
from coda_inductor.patterns.graph import aten

TOKENS, WIDTH, HEADS = 6, 16, 2
Program = Callable[[Tensor, Tensor], Tensor]


def drawn(grad: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (WIDTH, WIDTH))
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes)  # type: ignore[return-value]


def heads(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).view(TOKENS, HEADS, -1)


def neighbours(x: Tensor, w: Tensor) -> Tensor:
    q, angle = heads(x, w), x[:, None, : WIDTH // HEADS // 2]
    out = torch.empty_like(q)
    out[..., 0::2] = q[..., 0::2] * angle.cos() - q[..., 1::2] * angle.sin()
    out[..., 1::2] = q[..., 0::2] * angle.sin() + q[..., 1::2] * angle.cos()
    return out.flatten(1) @ w


def halves(x: Tensor, w: Tensor) -> Tensor:
    q = heads(x, w)
    out = torch.zeros_like(q)
    out[..., 4:] = q[..., :4] * 2
    out[..., :4] = -q[..., 4:]
    return out.flatten(1) @ w


def unequal(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :3], out[:, 3:9], out[:, 9:] = x[:, :3].sin(), (x @ w)[:, 3:9], x[:, 9:]
    return out @ w


def indexed(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    out = y.new_empty(2, *y.shape)
    out[0], out[1] = y.sin(), y.cos()
    return out @ w


def a_number(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, 0::2], out[:, 1::2] = 3.0, (x @ w)[:, 0::2]
    return out @ w


def a_row(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:2], out[2:] = w[0], (x @ w)[2:]
    return out @ w


def other_dtype(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x, dtype=torch.float32)
    out[:, ::2], out[:, 1::2] = x[:, ::2], (x @ w)[:, ::2]
    return out.double() @ w


def rounded_before(x: Tensor, w: Tensor) -> Tensor:
    """A copy into integers, and one into a tensor of 16 bits, are no copies to be left out."""
    y = x @ w
    whole, half = torch.empty_like(y[:, :8], dtype=torch.int64), torch.empty_like(y[:, :4], dtype=torch.float16)
    whole.copy_(y[:, :8] * 3)
    half.copy_(y[:, 8:12])
    out = torch.empty_like(y)
    out[:, :8], out[:, 8:12], out[:, 12:] = whole, half, y[:, 12:]
    return out @ w


def written_twice(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, ::2], out[:, 1::2], out[:, 3:3], out[:, ::2] = 1.0, (x @ w)[:, 1::2], x[:, 3:3], x[:, ::2]
    return out @ w


def returned(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, ::2], out[:, 1::2] = x[:, 1::2] + 1, (x @ w)[:, ::2]
    return out


WHOLE: dict[str, Program] = {
    "neighbours": neighbours, "halves": halves, "unequal": unequal, "indexed": indexed, "a number": a_number,
    "a row": a_row, "other dtype": other_dtype, "rounded before": rounded_before,
    "written twice": written_twice, "returned": returned,
}  # fmt: skip


def in_part(x: Tensor, w: Tensor) -> Tensor:
    out = x.clone()
    out[:, ::2] = (x @ w)[:, 1::2]
    return out @ w


def overlapping(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :9], out[:, 7:] = x[:, :9].cos(), (x @ w)[:, 7:]
    return out @ w


def overlapping_rows(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[1:3], out[:4] = (x @ w)[1:3], x[:4].cos()  # as many rows as there are
    return out @ w


def read_otherwise(x: Tensor, w: Tensor) -> Tensor:
    """What is read of another dimension than what is written."""
    out = x.clone()
    out[:, 8:] = (x @ w)[:, :8]
    return out[1:2] @ w


def uneven(x: Tensor, w: Tensor) -> Tensor:
    """Every third, and the others by two."""
    out = torch.zeros_like(x)
    out[:, ::3], out[:, 1::3], out[:, 2::3] = x[:, ::3], (x @ w)[:, 1::3], 1.0
    return out @ w


def two_dimensions(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, ::2], out[1:] = x[:, ::2], (x @ w)[1:]
    return out @ w


def read_between(x: Tensor, w: Tensor) -> Tensor:
    """What is read of a part before that is written again."""
    out = torch.zeros_like(x)
    out[:, ::2] = x[:, ::2].sin()
    first = out[:, ::2].clone() + out[:, 1::2].clone()
    out[:, ::2], out[:, 1::2] = (x @ w)[:, ::2], first
    return out @ w


def token_by_token(x: Tensor, w: Tensor) -> Tensor:
    out, h = x.new_empty(12, WIDTH), x[0]
    for i in range(12):
        h = (h @ w).tanh()
        out[i] = h
    return out @ w


OTHERS: dict[str, Program] = {
    "in part": in_part, "overlapping": overlapping, "rows": overlapping_rows, "uneven": uneven,
    "two dimensions": two_dimensions, "read between": read_between, "read otherwise": read_otherwise,
    "token by token": token_by_token,
}  # fmt: skip


def writes(f: Program, mode: str) -> tuple[int, int]:
    """How many writes of parts a graph has, before and after."""
    found = list[tuple[int, int]]()

    def count(graph: fx.Graph) -> int:
        return sum(len(graph.find_nodes(op="call_function", target=target)) for target in WRITES)

    def joined(graph: fx.Graph) -> None:
        before = count(graph)
        join_written(graph)
        graph.lint()
        found.append((before, count(graph)))

    capture(f, drawn(mode == "train"), {}, mode, joined)  # type: ignore[arg-type]
    (both,) = found
    return both


@pytest.mark.parametrize("name", WHOLE)
def test_parts_are_one_tensor(name: str) -> None:
    before, after = writes(WHOLE[name], "infer")
    assert before >= 2 and after == 0


def test_the_backward_puts_no_zeros_where_parts_were() -> None:
    assert writes(neighbours, "train") == (8, 5)  # the gradients of the five slices that it reads are left


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    before, after = writes(OTHERS[name], "infer")
    assert 0 < after <= before


@pytest.mark.parametrize("name", WHOLE | OTHERS)
def test_gradients_are_eagers(name: str) -> None:
    compare((WHOLE | OTHERS)[name])


def compare(f: Program) -> None:
    x, w = drawn(True)
    wanted = f(x, w)
    seed = torch.randn_like(wanted)
    with strict_reference(run=False):
        REPORTS.clear()
        found = torch.compile(f, backend="coda")(x, w)
        assert REPORTS
        pairs = zip(*(torch.autograd.grad(y, (x, w), seed) for y in (found, wanted)), strict=True)
        assert torch.allclose(found, wanted, 1e-10, 1e-10)
        assert all(torch.allclose(mine, theirs, 1e-10, 1e-10) for mine, theirs in pairs)


def test_an_input_is_written() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        x[:, ::2], x[:, 1::2] = (x @ w)[:, 1::2], x[:, ::2].clone()
        return x[:, ::2] @ w[::2]

    (x, w), (y, _) = drawn(), drawn()
    with strict_reference(run=False):
        assert torch.allclose(torch.compile(f, backend="coda")(x, w), f(y, w), 1e-12, 1e-12)
    assert torch.equal(x, y)


def test_a_part_that_is_returned_lies_in_the_whole() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        out[:, ::2], out[:, 1::2] = (x @ w)[:, 1::2], x[:, ::2]
        return out, out[:, ::2]

    x, w = drawn()
    with strict_reference(run=False):
        whole, part = torch.compile(f, backend="coda")(x, w)
    assert torch.equal(whole, f(x, w)[0]) and part.data_ptr() == whole.data_ptr() and part.stride() == (WIDTH, 2)


def test_sizes_that_are_symbols_stay() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        out = torch.empty_like(y)
        out[: y.shape[0] // 2], out[y.shape[0] // 2 :] = y[: y.shape[0] // 2].sin(), y[y.shape[0] // 2 :]
        return out @ w

    x, w = drawn()
    with strict_reference(run=False):
        call = torch.compile(f, backend="coda", dynamic=True)
        for tokens in (6, 4):
            assert torch.allclose(call(x[:tokens], w), f(x[:tokens], w), 1e-12, 1e-12)


def test_what_is_overwritten_since_is_read_where_it_was_copied() -> None:
    graph, value, rows = fx.Graph(), torch.randn(TOKENS, WIDTH), torch.randn(2, WIDTH)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    copy = graph.call_function(aten.copy.default, (y, x))
    written = graph.call_function(aten.copy_.default, (x, y))
    part = graph.call_function(aten.slice.Tensor, (copy, 0, 0, 2))
    read = graph.call_function(aten.sin.default, (part,))
    graph.output((read,))
    with FakeTensorMode() as mode:
        for node in (x, y, copy, written):
            node.meta["val"] = mode.from_tensor(value)
        part.meta["val"] = read.meta["val"] = mode.from_tensor(rows)
    before = str(graph)
    join_written(graph)
    assert str(graph) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_comes_from_another_device_is_copied(device: str) -> None:
    mode, graph = FakeTensorMode(), fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    with mode:
        x.meta["val"], y.meta["val"] = torch.empty(6, 2, device=device), torch.empty(6, 2, device="cuda")

    def call(target: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        with mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    whole = graph.call_function(aten.empty.memory_format, ([6, 4],), {"device": torch.device("cuda")})
    with mode:
        whole.meta["val"] = torch.empty(6, 4, device="cuda")
    for start, value in ((0, x), (2, y)):
        place = call(aten.slice.Tensor, whole, 1, start, start + 2)
        whole = call(aten.slice_scatter.default, whole, call(aten.copy.default, place, value), 1, start, start + 2)
    graph.output((whole,))
    join_written(graph)
    assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == (device == "cuda")
    assert (device == "cuda") != bool(graph.find_nodes(op="call_function", target=aten.copy.default))


def test_a_part_is_not_searched_for_index_by_index() -> None:
    even, odd = range(0, 1 << 60, 2), range(1, 1 << 60, 2)
    assert (
        not _meet(even, odd)
        and _meet(even, even[5:])
        and not _meet(range(7), range(7, 1 << 60))
        and _meet(even, range(1, 9))
    )
    assert not _meet(even, range(0))


def random_writes(seed: int) -> Program:
    """Parts of either dimension are written, multiplied and added to; what was made of them so far is read between."""
    numbers = [Random(seed + i).random() for i in range(200)]  # Dynamo would draw others

    def f(x: Tensor, w: Tensor) -> Tensor:
        left, values = list(numbers), [x @ w, x.sin(), x * 0.5]

        def draw(most: int) -> int:
            return int(left.pop() * most)

        def part(of: Tensor) -> tuple[slice | int, ...]:
            dim = draw(2)
            size, step = of.shape[dim], 1 + draw(3)
            windows = (
                draw(2 * size) - size,
                slice(draw(step), None, step),
                slice(0, size // 2),
                slice(size // 2, None),
            )
            return (slice(None),) * dim + (windows[draw(4)],)

        for _ in range(1 + draw(3)):
            out = (torch.zeros_like, torch.clone, torch.cos)[draw(3)](values[draw(len(values))])
            for _ in range(1 + draw(5)):
                put, value, how = part(out), values[draw(len(values))], draw(4)
                if how < 2:
                    out[put] = value[put]
                elif how == 2:
                    out[put] *= 2
                else:
                    out[put] += 1.5
                if draw(3) == 0:
                    values.append(out[part(out)].sum() + out)
            values.append(out if draw(3) == 0 else out @ w)
        return torch.stack([value.cos() for value in values[-4:]]).sum(0) @ w

    return f


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    compare(random_writes(seed))
