"""Keys and values that several heads share: attention reads them once, whichever way they were repeated."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, run
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.schedule.model import partition, saved
from coda_inductor.write import grouped

aten = torch.ops.aten
BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 128, 8, 2, 16
WIDTH = HEADS * SIZE

pytestmark = pytest.mark.usefixtures("uncached")

Repeat = Callable[[Tensor], Tensor]
"""Of keys or values [batch, length, groups, size], those of every head [batch, heads, length, size]."""
Made = Callable[[Tensor], Tensor]
"""What values are made by, of the same shape; they are then read in two places."""


def as_transformers(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    return x.transpose(1, 2)[:, :, None].expand(-1, -1, HEADS // groups, -1, -1).reshape(batch, HEADS, length, SIZE)


def heads_last(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).reshape(batch, length, HEADS, SIZE)
    return x.transpose(1, 2)


def permuted(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).permute(0, 2, 3, 1, 4)
    return x.reshape(batch, HEADS, length, SIZE)


def interleaved(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(HEADS // x.shape[2], dim=1)


def expanded(x: Tensor) -> Tensor:
    """Of one head for all: without a copy."""
    batch, length, _, _ = x.shape
    return x.transpose(1, 2).expand(batch, HEADS, length, SIZE)


class Attention(nn.Module):
    """A norm, then attention whose keys and values serve several heads each."""

    def __init__(
        self, repeat: Repeat, groups: int = GROUPS, made: Made | None = None, eager: bool = False, masked: bool = False
    ) -> None:
        super().__init__()
        self.repeat, self.groups, self.made, self.eager, self.masked = repeat, groups, made, eager, masked
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, groups * SIZE, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q = self.q(n).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = (w(n).unflatten(-1, (self.groups, SIZE)) for w in (self.k, self.v))
        v = self.made(v) if self.made else v
        keys, values = self.repeat(k), self.repeat(v)
        if self.eager:
            y = torch.matmul(torch.softmax(q @ keys.transpose(2, 3) / 4, -1), values)
        else:
            seen = x.detach()[:, None, None, :, 0] < 1.5 if self.masked else None
            y = F.scaled_dot_product_attention(q, keys, values, seen, is_causal=seen is None)
        flat = v.flatten(2).square().cumsum(1).sum(-1, keepdim=True) if self.made else 0
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2)) + 1e-2 * flat
        return out


def model(*kind: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(*kind, **more) for _ in range(3)), nn.Linear(WIDTH, WIDTH)).double()


def inputs(length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, length, WIDTH, dtype=torch.float64, requires_grad=True)


CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    **{f.__name__: (partial(model, f), LENGTH, 3) for f in (as_transformers, heads_last, permuted, interleaved)},
    "one for all heads": (lambda: model(as_transformers, 1), LENGTH, 3),
    "one for all heads, of as many tokens": (lambda: model(as_transformers, 1), HEADS, 3),
    "one for all heads, without a copy": (lambda: model(expanded, 1), LENGTH, 3),
    "values that a loop made, read flat as well": (lambda: model(as_transformers, made=torch.tanh), LENGTH, 3),
    "values that no loop made": (lambda: model(as_transformers, made=partial(torch.cumsum, dim=-1)), LENGTH, 3),
    "by a mask": (lambda: model(as_transformers, masked=True), LENGTH, 3),
    "products instead of attention": (lambda: model(as_transformers, made=torch.tanh, eager=True), LENGTH, 0),
}
"""Models, their tokens, and how many of their three attentions read keys once."""


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_eagers(name: str) -> None:
    """STRICT, float64; the joint graph interpreted."""
    make, length, count = CASES[name]
    assert equals_eager(make(), inputs(length), run=False) == count


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_are_eagers(dynamic: bool) -> None:
    assert equals_eager(model(as_transformers), inputs(), run=True, dynamic=dynamic) == 3


def equals_eager(plain: nn.Module, x: Tensor, run: bool, **how: Any) -> int:
    """Output and all gradients, with Regions; how many attentions read keys once."""
    given = [x, *plain.parameters()]
    y = plain(x)
    wanted = [y, *torch.autograd.grad(y.sin().sum(), given)]
    with strict_reference(run=run):
        REPORTS.clear()
        y = torch.compile(plain, backend="coda", **how)(x)
        found = [y, *torch.autograd.grad(y.sin().sum(), given)]
    assert sum(len(r.sites) for r in REPORTS) >= 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-10
    return sum(len(r.grouped) for r in REPORTS)


def test_no_copy_is_kept() -> None:
    """In bfloat16, as CUDA traces it: the backward keeps what the products made of keys and values."""
    found = list[int]()

    def on_graph(graph: fx.Graph, disable: frozenset[str]) -> None:
        rewrite_for(graph, Settings(target="reference", disable=disable))
        halves = partition(graph)
        assert halves is not None
        found.append([*saved(halves).values()].count(BATCH * LENGTH * WIDTH * 2))

    for disable in (frozenset({"grouped"}), frozenset[str]()):
        call = partial(on_graph, disable=disable)
        capture(model(as_transformers).bfloat16(), (inputs().bfloat16(),), {}, "train", call)
    assert found[0] - found[1] == 6  # keys and values of three layers


# ---- what stays


def tiled(x: Tensor) -> Tensor:
    """The heads one after another, and that several times: another order."""
    batch, length, groups, _ = x.shape
    x = x.transpose(1, 2)[:, None].expand(-1, HEADS // groups, -1, -1, -1)
    return x.reshape(batch, HEADS, length, SIZE)


def apart(x: Tensor) -> Tensor:
    """The numbers of a head do not lie side by side."""
    return as_transformers(torch.cat([x, x.sin()], -1).unflatten(-1, (SIZE, 2))[..., 0])


class Read(Attention):
    """The repeated keys are read elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (w(n).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        keys, values = self.repeat(k), self.repeat(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)) + keys.cumsum(1).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


class Unequal(Attention):
    """Keys have fewer heads than values."""

    def __init__(self, repeat: Repeat) -> None:
        super().__init__(repeat)
        self.v = nn.Linear(WIDTH, 2 * GROUPS * SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (w(n).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def two(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(), make(), nn.Linear(WIDTH, WIDTH)).double()


class Returned(Attention):
    """Keys are returned, as of a cache, so that the caller may overwrite them before the backward."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)), k.detach()


class Summed(torch.autograd.Function):
    """Repeats whose gradients are added up in another dtype, or over something else as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return as_transformers(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = grad.unflatten(1, (GROUPS, -1))
        if ctx.how == "features":
            return parts.sum((2, 4), keepdim=True).squeeze(2).expand(-1, -1, -1, SIZE).transpose(1, 2), None
        found = parts.sum(2, dtype=torch.float32 if ctx.how == "float32" else None).to(grad.dtype)
        whole = torch.sum(grad, None, keepdim=True) if ctx.how == "everything" else 0
        return (found + whole).transpose(1, 2), None


def summed(x: Tensor, how: str) -> Tensor:
    return Summed.apply(x, how)  # type: ignore[no-any-return, no-untyped-call]


def shifted(x: Tensor) -> Tensor:
    """Rows that do not begin at multiples of 16 bytes."""
    wider = torch.cat([x[..., :1], x], -1)
    return as_transformers(wider[..., 1:])


STAYS: dict[str, Callable[[], nn.Module]] = {
    "where rows begin": lambda: two(lambda: Attention(shifted)),
    **{
        f"summed, {how}": partial(two, partial(Attention, partial(summed, how=how)))
        for how in ("float32", "everything", "features")
    },
    "in another order": lambda: two(lambda: Attention(tiled)),
    "not side by side": lambda: two(lambda: Attention(apart)),
    "read elsewhere": lambda: two(lambda: Read(as_transformers)),
    "of unequal heads": lambda: two(lambda: Unequal(as_transformers)),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_something_else_stays(name: str) -> None:
    plain, x = STAYS[name](), inputs()
    assert equals_eager(plain, x, run=False) == 0
    with torch.no_grad():
        ran = run(plain, x, options=REFERENCE)
        wanted = plain(x)
    assert (ran == [] and sum(len(report.grouped) for report in ran.reports) == 0) or "summed" in name
    assert float((ran.output - wanted).norm() / wanted.norm()) < 1e-10


@pytest.mark.parametrize("theirs", ["results", "inputs"])
def test_what_the_user_overwrites_in_between_is_not_read_again(theirs: str) -> None:
    """The copies were kept for the backward, and what they are copies of is the caller's."""
    plain, x = Returned(as_transformers).double(), inputs()
    cache = torch.randn(BATCH, LENGTH, GROUPS, SIZE, dtype=torch.float64)

    def of_inputs(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = plain.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, as_transformers(keys), as_transformers(values))
        return plain.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    found = []
    for compile_it in (False, True):
        keys, values = cache.clone(), cache.sin()
        function: Callable[..., Any] = plain if theirs == "results" else of_inputs
        args = (x,) if theirs == "results" else (x, keys, values)
        if compile_it:
            ran = run(function, *args, grad=True, options=REFERENCE)
            assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 0
        out = ran.output if compile_it else function(*args)
        y, overwritten = out if theirs == "results" else (out, keys)
        overwritten.data.zero_()
        found.append(torch.autograd.grad(y.sin().sum(), [x, plain.q.weight]))
    for mine, eager in zip(found[1], found[0], strict=True):
        assert float((mine - eager).norm() / eager.norm()) < 1e-10


@pytest.mark.parametrize("beside", ["one gradient of two", "parts of one"])
def test_gradients_that_share_memory(beside: str) -> None:
    """They lie in memory as they did: none could be copied by itself."""

    def f(q: Tensor, k: Tensor, more: Tensor, w: Tensor) -> Tensor:
        keys = as_transformers(k + more if beside == "one gradient of two" else torch.cat([k, more], 1))
        y = F.scaled_dot_product_attention(
            q, keys, as_transformers(2 * k.detach()[:, :1].expand(-1, keys.shape[2], -1, -1))
        )
        return y.flatten(0, 2) @ w

    torch.manual_seed(0)
    shapes = (3, HEADS, 320, SIZE), (3, 40, GROUPS, SIZE), (3, 40, GROUPS, SIZE), (SIZE, SIZE)
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = torch.autograd.grad(f(*given).sin().sum(), given)
    ran = run(f, *given, grad=True, options=REFERENCE)
    assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 1
    for mine, eager in zip(torch.autograd.grad(ran.output.sin().sum(), given), wanted, strict=True):
        assert float((mine - eager).norm() / eager.norm()) < 1e-10 and mine.stride() == eager.stride()


def test_switched_off_it_stays() -> None:
    plain, x = model(as_transformers), inputs()
    for options, count in (
        ({}, 3),
        ({"disable": "grouped"}, 0),
        ({"only": "bilinearity"}, 0),
        ({"numerics": "strict"}, 3),
    ):
        ran = run(plain, x, grad=True, options=REFERENCE | options)
        assert ran == [] and sum(len(report.grouped) for report in ran.reports) == count


# ---- what CUDA calls: the operations' schemas, on tensors without memory


def on_cuda(op: str, dropout: float = 0.0, again: bool = False) -> fx.Graph:
    """Forward and backward of one of CUDA's attentions, by keys that four heads share. `again`: a gradient is read
    besides the sums."""
    graph, get = fx.Graph(), operator.getitem
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, heads in zip("gqkv", (HEADS, HEADS, GROUPS, GROUPS), strict=True):
            like = torch.empty(BATCH, LENGTH, heads, SIZE, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            graph.placeholder(name).meta["val"] = like

        def call(target: object, *args: object, **kwargs: object) -> fx.Node:
            node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
            fakes = tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
            node.meta["val"] = target(*fakes[0], **fakes[1])  # type: ignore[operator]
            return node

        def copy(x: fx.Node) -> fx.Node:
            more = call(aten.expand.default, call(aten.unsqueeze.default, x, 2), [BATCH, GROUPS, 4, LENGTH, SIZE])
            dense = call(aten.clone.default, more, memory_format=torch.contiguous_format)
            return call(aten.view.default, dense, [BATCH, HEADS, LENGTH, SIZE])

        g, q, *short = graph.find_nodes(op="placeholder")
        k, v = (copy(call(aten.neg.default, x)) for x in short)
        if op == "efficient":
            out = call(aten._scaled_dot_product_efficient_attention.default, q, k, v, None, True, dropout)
            o, lse, seed, offset = (call(get, out, i) for i in range(4))
            back = call(
                aten._scaled_dot_product_efficient_attention_backward.default,
                g, q, k, v, None, o, lse, seed, offset, dropout, [True, True, True, False],
            )  # fmt: skip
        else:
            mask = (None,) if op == "cudnn" else ()
            saved = (True,) if op == "cudnn" else ()
            name = f"_scaled_dot_product_{op}_attention"
            out = call(getattr(aten, name).default, q, k, v, *mask, *saved, dropout, True)
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (call(get, out, i) for i in range(9))
            noise, more = (seed, offset), (cum_q, cum_k, max_q, max_k)
            last = (*noise, None, *more, dropout, True) if op == "cudnn" else (*more, dropout, True, *noise)
            back = call(getattr(aten, f"{name}_backward").default, g, q, k, v, o, lse, *last)
        dq, dk, dv = (call(get, back, i) for i in range(3))
        sums = list[fx.Node]()
        for gradient in (dk, dv):
            parts = call(aten.view.default, gradient, [BATCH, GROUPS, 4, LENGTH, SIZE])
            sums.append(call(aten.squeeze.dim, call(aten.sum.dim_IntList, parts, [2], True), 2))
        graph.output([o, dq, *sums, *([dk] if again else [])])
    return graph


@pytest.mark.parametrize("op", ["cudnn", "flash"])
def test_cuda_is_asked_for_grouped_attention(op: str) -> None:
    graph = on_cuda(op)
    (found,) = grouped.group_heads(graph)
    assert (found.heads, found.shape) == (4, f"[{BATCH}, {HEADS}, {LENGTH}, {SIZE}]")
    outputs: Any = graph.output_node().args[0]
    shapes = [[*n.meta["val"].shape] for n in outputs]
    assert shapes == [[BATCH, heads, LENGTH, SIZE] for heads in (HEADS, HEADS, GROUPS, GROUPS)]
    assert not any(n.target in (aten.expand.default, aten.sum.dim_IntList) for n in graph.nodes)
    graph.lint()


@pytest.mark.parametrize(
    ("op", "more"),
    [("efficient", {}), ("cudnn", {"dropout": 0.5}), ("flash", {"dropout": 0.5}), ("cudnn", {"again": True})],
)
def test_cuda_is_asked_as_before(op: str, more: dict[str, Any]) -> None:
    """Where the kernel takes no fewer heads, draws, or a gradient is read by itself."""
    assert grouped.group_heads(on_cuda(op, **more)) == ()


@torch.library.custom_op("coda_tests_grouped::put_", mutates_args={"x"})
def put_(x: Tensor) -> None:
    """Overwrites it with its sine."""
    x.copy_(x.sin())


def test_what_is_overwritten_before_attention_is_not_read() -> None:
    """The copies have what was there before."""

    def f(x: Tensor, keys: Tensor, values: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        k, v = as_transformers(keys), as_transformers(values)
        put_(keys)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.gelu(y.transpose(1, 2).flatten(2) @ w)

    torch.manual_seed(0)
    shapes = (BATCH, LENGTH, WIDTH), *2 * [(BATCH, LENGTH, GROUPS, SIZE)], (WIDTH, WIDTH)
    given = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    wanted = f(*(t.clone() for t in given))
    ran = run(f, *given, options=REFERENCE)
    assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 0
    assert float((ran.output - wanted).norm() / wanted.norm()) < 1e-10
