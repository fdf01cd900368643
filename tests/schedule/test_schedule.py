"""The byte model: small graphs counted by hand, real ones against Inductor's own schedule."""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import coverage_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coda_inductor.explain.capture import OnCpu, Untouched, capture
from coda_inductor.schedule import mixed
from coda_inductor.schedule.model import Kernel, kernels

M, N, K = 512, 256, 128
X, W, BIG = torch.empty(M, K), torch.empty(K, N), torch.empty(M, N)
TILE, TOKENS, FEATURES = 4 * M * N, 4 * M, 4 * N


def kernels_of(function: Callable[..., Any], *args: Tensor) -> list[Kernel]:
    found: list[Kernel] = []
    capture(function, args, {}, "infer", lambda graph: found.extend(kernels(graph)))
    return found


def bytes_of(function: Callable[..., Any], *args: Tensor) -> list[int]:
    return [k.bytes for k in kernels_of(function, *args)]


def test_products_alone_are_no_kernel() -> None:
    assert bytes_of(lambda x, w, v: x @ w @ v.t(), X, W, W) == []


def test_products_one_above_the_other_are_no_kernel() -> None:
    """Each is written where it shall lie; what a loop makes and a product that is read elsewhere are copied."""
    both = lambda x, y: torch.cat([x.t() @ y, y.t() @ x])  # noqa: E731
    assert bytes_of(both, X, X + 0) == []
    assert bytes_of(lambda x, y: torch.cat([x.t() @ y, y.t() @ x], 1), X, X + 0) == []
    a, b = 4 * K * K, 4 * K * K
    assert sum(bytes_of(lambda x, y: torch.cat([m := x.t() @ y, m], 1), X, X + 0)) == a + b + a
    assert bytes_of(lambda x, y: torch.cat([x.t() @ y, torch.exp(y.t() @ x)]), X, X) == [a + b + a + b]
    assert sum(bytes_of(lambda x, y: (m := x.t() @ y, torch.cat([m, y.t() @ x]))[0:2], X, X)) == a + b + a + b


def test_a_pointwise_chain_is_one_kernel() -> None:
    assert bytes_of(lambda x, w: torch.exp(F.relu(x @ w) + 1.0) * 2.0, X, W) == [2 * TILE]


def test_vectors_count_once() -> None:
    assert bytes_of(lambda x, w, r, b: (x @ w) * r[:, None] + b, X, W, X[:, 0].clone(), W[0].clone()) == [
        2 * TILE + TOKENS + FEATURES
    ]


def test_a_norm_with_its_residual_is_one_kernel_with_two_tiles_out() -> None:
    def f(h: Tensor, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x @ w
        return h, (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)) @ v.t()

    assert bytes_of(f, BIG, X, W, W) == [4 * TILE]


def test_a_sum_over_tokens_shares_no_kernel_with_what_makes_it() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x @ w)
        return y, y.sum(0)

    assert sorted(bytes_of(f, X, W)) == [TILE + FEATURES, 2 * TILE]


def test_unrelated_work_of_one_size_is_two_kernels() -> None:
    assert bytes_of(lambda x, y: (x + 1, y + 1), BIG, BIG.clone()) == [2 * TILE, 2 * TILE]


def test_readers_of_one_tensor_share_a_kernel() -> None:
    assert bytes_of(lambda x: (x + 1, x * 2), BIG) == [3 * TILE]


def test_a_gather_counts_what_it_uses() -> None:
    table, index = torch.empty(100_000, N), torch.zeros(M, dtype=torch.long)
    assert bytes_of(lambda t, i: F.embedding(i, t) + 1, table, index) == [2 * TILE + 8 * M]


def test_slices_count_as_far_as_they_reach_and_no_further() -> None:
    half = N // 2
    assert bytes_of(lambda x: x[:, :half] * 2, BIG) == [TILE]
    assert bytes_of(lambda x: x * 2 + torch.cat((-x[:, half:], x[:, :half]), 1), BIG) == [2 * TILE]


def test_a_copy_into_another_order_is_a_kernel_of_its_own() -> None:
    assert bytes_of(lambda x: (x + 1).t().contiguous(), BIG) == [2 * TILE]
    assert bytes_of(lambda x: (y := x + 1, y.t().contiguous()), BIG)[-1] == 2 * TILE


def test_a_copy_of_what_lies_so_already_is_none() -> None:
    """Inductor's `remove_noop_ops` drops it, unless it is returned."""
    assert bytes_of(lambda x, w: (x @ w).clone() @ w.t(), X, W) == []
    assert bytes_of(lambda x, w: (x @ w).clone(), X, W) == [2 * TILE]


def test_symbolic_sizes_count_at_their_hints() -> None:
    x = torch.empty(M, K)
    torch._dynamo.mark_dynamic(x, 0)
    assert bytes_of(lambda x, w: F.relu(x @ w), x, W) == [2 * TILE]


def test_a_region_is_no_memory_bound_kernel() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    region = graph.call_function(opaque, ([x, w],))
    tile = graph.call_function(operator.getitem, (region, 0))
    after = graph.call_function(torch.ops.aten.relu.default, (tile,))
    graph.output(after)
    for node, value in ((x, X), (w, W), (region, [BIG, X]), (tile, BIG), (after, BIG)):
        node.meta["val"] = value
    (kernel,) = kernels(graph)
    assert kernel == Kernel((after,), {tile: TILE}, {after: TILE})


def opaque(inputs: list[Tensor]) -> list[Tensor]:
    """Stands for coda.region: an operation that the model does not know."""
    raise NotImplementedError


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "inductor_bytes.py"
    spec = importlib.util.spec_from_file_location("inductor_bytes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gained(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


HEADS, IMAGE, TABLE = torch.empty(2, 512, 8, 64), torch.empty(4, 32, 8, 8), torch.empty(512, 64)
TURNED, ROW = HEADS.transpose(1, 2), torch.empty(64)
ORDERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a statistic beside a gradient that is turned": (
        lambda g, y, t: (g.transpose(1, 2) * t, (g.transpose(1, 2) * y.transpose(1, 2)).sum((1, 3))),
        (HEADS, HEADS.clone(), TABLE),
    ),
    "a chain through memory": (lambda x, t: ((y := x.transpose(1, 2) * t), y.relu()), (HEADS, ROW)),
    "a chain, given so": (lambda x, t: ((y := x * t), y.relu()), (TURNED, ROW)),
    "a statistic of what is stored": (
        lambda x, t: ((y := x.transpose(1, 2) * t), (y * y).sum((1, 3))), (HEADS, ROW)
    ),
    "divided by its sum": (
        lambda x, t: (y := x.transpose(1, 2) * t) / y.sum((1, 3), keepdim=True), (HEADS, ROW)
    ),
    "a norm of heads, stored and read": (lambda k, w: ((y := gained(k.transpose(1, 2), w)), y * 2), (HEADS, ROW)),
    "two permutations": (
        lambda x: (x * 2, x.permute(1, 2, 0, 3).permute(0, 2, 1, 3) * 3), (HEADS,)
    ),
    "a dimension of one moved": (lambda x: (x * 2, x.transpose(0, 1) * 3), (HEADS[:1],)),
    "a sum of each head, which is of another order": (
        lambda x: (y := x.transpose(1, 2) * 2) * y.sum(-1)[..., None],
        (HEADS,),
    ),
    "a scan": (lambda x: (x.transpose(1, 2) * 2, x.transpose(1, 2).cumsum(-1)), (HEADS,)),
    "channels last": (
        lambda x, w: ((y := x * w), y - y.mean(1, keepdim=True)),
        (IMAGE.to(memory_format=torch.channels_last), IMAGE[:1, :, :1, :1].clone()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_loops_run_as_memory_lies(bench: ModuleType, name: str) -> None:
    """As many kernels as Inductor has, of as many bytes, whatever the order of the dimensions; mostly one."""
    f, args = ORDERS[name]
    ours, own = bench.modelled(f, args, "infer"), bench.own_schedule(f, args, "infer")
    assert [k.bytes for k in ours] == [row["bytes"] for row in own]
    assert len(own) == 1 + ("each head" in name)


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :32], x[..., 32:]


@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "by parts"])
def test_the_parts_of_a_cat_share_a_kernel_with_a_sum(bench: ModuleType, by_parts: bool) -> None:
    """The gradient of a norm of heads and of the rotary embedding before it. Parts that are made of a sum over as many
    numbers as a part has are written where they belong, each by a loop; of a sum over all, by one loop."""

    def f(g: Tensor, y: Tensor, w: Tensor) -> Tensor:
        z = g * y
        first, second = cut(z)
        a, b = cut(g - y * ((first + second) if by_parts else z).sum(-1, keepdim=True))
        return torch.cat([a * 2 - b, b * 2 + a], -1).flatten(2) @ w

    args = HEADS, HEADS.clone(), torch.empty(512, 64)
    ours, own = bench.modelled(f, args, "infer"), bench.own_schedule(f, args, "infer")
    assert [k.bytes for k in ours] == [row["bytes"] for row in own] and len(own) == 1


class Turned(nn.Module):
    """Attention with norms of heads, behind rotary embeddings of halves or before them."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(4))
        self.last = last

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :64], x[..., 64:]
            return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

        def normed(x: Tensor) -> Tensor:
            return F.rms_norm(x, (128,))

        q, k, v = (p(x).unflatten(-1, (16, 128)) for p in (self.q, self.k, self.v))
        q, k = (normed(turned(t)) if self.last else turned(normed(t)) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", [True, False], ids=["behind", "before"])
def test_agrees_on_norms_of_heads(bench: ModuleType, last: bool) -> None:
    """In training: what is computed of two halves is computed twice, and so much that it is stored."""
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        model, x = Turned(last), torch.zeros(4, 2048, 2048, dtype=torch.bfloat16)
        args = x, *(torch.zeros(2048, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    own = sum(row["bytes"] for row in bench.own_schedule(model, args, "train"))
    ours = sum(k.bytes for k in bench.modelled(model, args, "train"))
    assert abs(ours / own - 1) < 0.02


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "rms-4096", "rms-16384"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_agrees_with_inductors_own_schedule(bench: ModuleType, name: str, mode: Literal["infer", "train"]) -> None:
    """At two layers; in full depth: bench/inductor_bytes.py."""
    if name in ("llama3-8b", "gpt2"):
        pytest.importorskip("transformers")
    own, ours = bench.compared(name, mode, 2)
    assert abs(ours / own - 1) < 0.10


class Between(nn.Module):
    """Norms between two products; what is returned is `loss` of it."""

    def __init__(self, *norms: nn.Module, bias: bool = False, loss: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        first, second = (nn.Linear(4096, 4096, bias=bias) for _ in range(2))
        self.layers, self.loss = nn.Sequential(first, *norms, second).to(torch.bfloat16), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layers(x))


def rms(gain: bool = True) -> nn.Module:
    return nn.RMSNorm(4096, elementwise_affine=gain)


def entropy(logits: Tensor) -> Tensor:
    """Its gradient is scattered into zeros, which Inductor does not write."""
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long))


NORMS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "two statistics": (16384, lambda: Between(nn.LayerNorm(4096))),
    "a sum over tokens of what the statistic's kernel writes": (16384, lambda: Between(rms(gain=False), bias=True)),
    "a norm of a norm": (16384, lambda: Between(rms(), rms())),
    "a number expanded, which products take": (4096, lambda: Between(rms(), loss=Tensor.sum)),
    "as square as it gets": (4096, lambda: Between(rms(), bias=True)),
    "a cross-entropy": (4096, lambda: Between(rms(), loss=entropy)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", NORMS)
def test_agrees_on_a_norm_between_products(bench: ModuleType, name: str) -> None:
    """In training, where its gain's gradient is a sum over the tokens, beside the statistics of the rows."""
    tokens, build = NORMS[name]
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        model, x = build(), torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    own = sum(row["bytes"] for row in bench.own_schedule(model, (x,), "train"))
    ours = sum(k.bytes for k in bench.modelled(model, (x,), "train"))
    assert abs(ours / own - 1) < 0.02


def test_the_rules_of_both_orders_are_inductors_own() -> None:
    """They are read in its source, of which these are the lines of torch 2.13 and 2.15; where it is written otherwise
    by now, this test is the first to know."""
    sizes = "size_thres = 5 * 2**20\nsympy.Ge(nrow, 4096),\nstatically_known_leq(ncol, 1024 * 16)"
    dtypes = 'get_reduction_type() in {"sum"}\nand node.get_dtype()  # type\n in {torch.float16, torch.float32}'
    assert mixed.rules_in(f"sympy.Ge(nrow, ncol * 2),\n{sizes}") == mixed.Rules(4096, 2, 5 << 20, 16384)
    known = mixed.Rules(4096, 0, 5 << 20, 16384, frozenset({torch.float16, torch.float32}))
    assert mixed.rules_in(f"{dtypes}\n{sizes}") == known
    assert mixed.rules_in("") == mixed.Rules()
    installed = mixed.rules()
    if version("2.13") <= version(torch.__version__) < version("2.16"):
        assert installed is not None and installed.rows and installed.elements and installed.columns < mixed.UNLIMITED
        assert installed.rows_per_column == (2 if version(torch.__version__) < version("2.15") else 0)


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.empty(*shape, dtype=dtype) for _ in range(count))


TALL = tensors(8192, 1024)
SUMS: dict[str, Callable[..., Any]] = {  # over the features and over the tokens, which Inductor takes in one kernel
    "one of each": lambda x, y, z: ((x * y).sum(1), x.sum(0)),
    "two tensors of a statistic": lambda x, y, z: ((x * y).sum(1), x.sum(0), y.sum(0)),
    "three statistics": lambda x, y, z: ((x * y).sum(1), (y * z).sum(1), (z * z).sum(1), x.sum(0), y.sum(0), z.sum(0)),
    "two sums over tokens of one tensor": lambda x, y, z: ((x * y).sum(1), x.sum(0), (x * y).sum(0)),
    "of what it stores": lambda x, y, z: ((h := x + y), (h * z).sum(1), h.sum(0)),
    "a vector in common": lambda x, y, z: ((x * z[0]).sum(1), (y * z[0]).sum(0)),
    "a statistic of what is stored there": lambda x, y, z: (
        (s := (x * y).sum(1)),
        x.sum(0),
        (h := x * s[:, None]),
        (h * z).sum(1),
    ),
    "a pass before": lambda x, y, z: (x + 1, (x * y).sum(1), x.sum(0)),
    "a pass behind": lambda x, y, z: ((x * y).sum(1), x.sum(0), x + 1),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_both_orders(bench: ModuleType, name: str) -> None:
    ours, own = bench.modelled(SUMS[name], TALL, "infer"), bench.own_schedule(SUMS[name], TALL, "infer")
    assert_alike(ours, own)


def assert_alike(ours: list[Kernel], own: list[dict[str, Any]], least: int = 1 << 24) -> None:
    """As many large kernels of as many bytes; Inductor writes what a sum over tokens was split into as well."""
    large = [sorted(b for b in found if b > least) for found in ([k.bytes for k in ours], [r["bytes"] for r in own])]
    assert large[0] == [pytest.approx(b, rel=0.05) for b in large[1]] and large[0]


SHAPES: dict[str, tuple[Tensor, ...]] = {
    "square": tensors(4096, 4096),
    "wide": tensors(4096, 8192),
    "few rows": tensors(2048, 4096),
    "small": tensors(4096, 1024),
    "long rows": tensors(65536, 17000),
    "double": tensors(8192, 1024, dtype=torch.float64),
    "half": tensors(16384, 1024, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sums_of_both_orders_by_shape(bench: ModuleType, name: str) -> None:
    """Which the installed torch takes in one kernel, it says itself."""
    f = SUMS["one of each"]
    assert_alike(bench.modelled(f, SHAPES[name], "infer"), bench.own_schedule(f, SHAPES[name], "infer"), 1 << 23)


def test_sums_of_both_orders_read_few_tensors(bench: ModuleType) -> None:
    def f(x: Tensor, y: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return (x * y).sum(1), x.sum(0), sum(more[:5], x), sum(more[5:], x)

    args = tensors(8192, 1024, count=12)
    assert_alike(bench.modelled(f, args, "infer"), bench.own_schedule(f, args, "infer"))


@pytest.mark.parametrize("name", ["vit_hf", "vit_l"])
def test_agrees_where_sums_are_mixed(bench: ModuleType, name: str) -> None:
    """LayerNorms and biases at a real width: their gradients are sums over tokens beside sums over features."""
    pytest.importorskip("transformers")
    model, args = coverage_models.build(name, 2)
    own = sum(row["bytes"] for row in bench.own_schedule(coverage_models.Loss(name, model), args, "train"))
    model, args = coverage_models.build(name, 2)
    ours = sum(k.bytes for k in bench.modelled(coverage_models.Loss(name, model), args, "train"))
    assert abs(ours / own - 1) < 0.06
