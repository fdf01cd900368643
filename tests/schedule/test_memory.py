"""What a contest takes for a tensor in memory, and what it takes for a formula that Inductor repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.codegen.target import TARGETS
from coda_inductor.plan.draft import MAX_READ
from coda_inductor.schedule.memory import Memory

BF16 = torch.bfloat16


def read(node: fx.Node) -> Memory:
    return Memory(node.graph)


def nodes(f: Callable[..., Any], *args: Tensor) -> dict[str, fx.Node]:
    """The nodes of f's graph by operation; of several alike, the last."""
    graph = make_fx(f, tracing_mode="fake")(*args).graph
    return {n.target._schema.name.split("::")[1]: n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)}


X, W, V = (torch.randn(s, dtype=BF16) for s in ((96, 64), (64, 128), (128, 64)))


def test_what_two_loops_share_is_made_by_both() -> None:
    """A sigmoid in float32 costs more to read than the product that it is made of."""

    def f(x: Tensor, w: Tensor) -> Any:
        s = torch.sigmoid((x @ w).float())
        return s.exp().sum(), (s * 2).sum()

    found = nodes(f, X, W)
    memory = read(found["mm"])
    assert memory.of(found["sigmoid"]) == {found["mm"]} and not memory.holds(found["sigmoid"])
    assert memory.holds(found["mm"]) and not memory.holds(found["_to_copy"])


def test_what_a_product_takes_is_there() -> None:
    found = nodes(lambda x, w, v: F.gelu(x @ w) @ v, X, W, V)
    assert read(found["gelu"]).of(found["gelu"]) == {found["gelu"]}


def test_a_view_that_a_product_takes_puts_its_base_there() -> None:
    found = nodes(lambda x, w, v: torch.tanh(x @ w).view(-1, 128) @ v, X, W, V)
    assert read(found["view"]).of(found["view"]) == {found["tanh"]}


def test_a_residual_stream_is_read_rather_than_its_parts() -> None:
    """One tile instead of two; the norm before its gain is read from the stream and a number for each token."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Any:
        h = x @ w @ v + x
        n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))
        return n.sum(), (h * 2).sum(), (n * 3).sum()

    graph = make_fx(f, tracing_mode="fake")(X, W, V).graph
    by = {str(n.target).split(".")[1]: n for n in reversed(graph.nodes) if n.op == "call_function"}
    first_mul = by["mul"]
    assert read(by["add"]).holds(by["add"])
    assert read(first_mul).of(first_mul) == {by["add"], by["mean"]}


def test_a_split_is_part_of_what_is_split() -> None:
    """As Phi-3's gate and up, of one product."""

    def f(x: Tensor, w: Tensor) -> Any:
        gate, up = (x @ w).split(64, -1)
        return (gate * up).sum(), up.exp().sum()

    found = nodes(f, X, W)
    items = [n for n in found["mm"].graph.nodes if "getitem" in n.name]
    assert len(items) == 2 and {read(n).of(n) for n in items} == {frozenset({found["mm"]})}
    assert read(items[0]).of(found["split"]) == {found["mm"]}


def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every value were a tensor, which is how contests once charged Inductor for passes that it never makes."""
    monkeypatch.setattr(Memory, "_of", lambda self, node, late: frozenset({node}))
    with pytest.raises(AssertionError):
        test_what_two_loops_share_is_made_by_both()


def test_an_epilogue_may_read_what_a_kernel_can() -> None:
    assert all(row.max_operands == MAX_READ for row in TARGETS.values())
