"""Keys and values that several heads share: attention reads them once, whichever way they were repeated."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from shared_heads import (
    BATCH,
    GROUPS,
    HEADS,
    LENGTH,
    SIZE,
    WIDTH,
    as_transformers,
    equals_eager,
    expanded,
    heads_last,
    inputs,
    interleaved,
    model,
    permuted,
)
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from coda_inductor.attention import grouped
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.schedule.model import partition, saved

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("interpreted")

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


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_eagers(name: str) -> None:
    """STRICT, float64; the joint graph interpreted."""
    make, length, count = CASES[name]
    assert equals_eager(make(), inputs(length), run=False) == count


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_are_eagers(dynamic: bool) -> None:
    assert equals_eager(model(as_transformers), inputs(), run=True, dynamic=dynamic) == 3


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


# ---- what CUDA calls: the operations' schemas, on tensors without memory


def on_cuda(op: str, dropout: float = 0.0, again: bool = False) -> fx.Graph:
    """Forward and backward of one of CUDA's attentions, by keys that four heads share. `again`: a gradient is read
    besides the sums."""
    graph, get = fx.Graph(), operator.getitem
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name in "gq":
            like = torch.empty(BATCH, LENGTH, HEADS, SIZE, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            graph.placeholder(name).meta["val"] = like
        for name, shape in (("x", (BATCH * LENGTH, WIDTH)), ("w", (WIDTH, GROUPS * SIZE))):
            graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")

        def call(target: object, *args: object, **kwargs: object) -> fx.Node:
            node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
            fakes = tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
            node.meta["val"] = target(*fakes[0], **fakes[1])  # type: ignore[operator]
            return node

        def copy() -> fx.Node:
            made = call(aten.view.default, call(aten.mm.default, *graph_inputs), [BATCH, LENGTH, GROUPS, SIZE])
            x = call(aten.permute.default, made, [0, 2, 1, 3])
            more = call(aten.expand.default, call(aten.unsqueeze.default, x, 2), [BATCH, GROUPS, 4, LENGTH, SIZE])
            dense = call(aten.clone.default, more, memory_format=torch.contiguous_format)
            return call(aten.view.default, dense, [BATCH, HEADS, LENGTH, SIZE])

        g, q, *graph_inputs = graph.find_nodes(op="placeholder")
        k, v = copy(), copy()
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
