"""The lift's truth: the term of every node, on the values of the graph's inputs, is the node's value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import NAMES, Graph, Read, captured, error, read
from torch import Tensor, fx

from coda_inductor.explain.capture import capture
from coda_inductor.patterns.lift import Lifted, lift
from coda_inductor.patterns.terms import Term

OVERFLOWS = {"overflows"}
"""Literals are multiplied before they meet a tensor, so h * 1e308 * 1e308 is infinite later than in eager."""


def untrue(r: Read, tolerance: float = 1e-10) -> list[str]:
    """The nodes whose term is not their value."""
    wrong = []
    for node, term in r.lifted.term.items():
        wanted = r.values[node.name]
        if not error(r.value.of(node, term).to(wanted.dtype), wanted) < tolerance:
            wrong.append(f"{node.format_node()}: {term}")
    return wrong


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "name"), [n for n in NAMES if n[1] not in OVERFLOWS])
def test_every_term_is_its_nodes_value(kind: str, name: str | int) -> None:
    reads = read(kind, name)
    assert all(r.lifted.term for r in reads)
    for r in reads:
        assert untrue(r) == []


def lifted(function: Any, *args: Tensor, rounding: bool = False) -> Lifted:
    graphs: list[fx.Graph] = []
    capture(function, args, {}, "infer", graphs.append)
    (graph,) = graphs
    return lift(graph, rounding)


def outputs(of: Lifted) -> list[Term]:
    """The terms of what the graph returns."""
    (returned,) = next(n for n in of.graph.nodes if n.op == "output").args
    return [of.term[n] for n in returned]


def R(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_spellings_of_one_value_are_one_term() -> None:
    def roots(x: Tensor) -> Any:
        v = (x * x).mean(-1, keepdim=True) + 1e-5
        w = x.pow(2).sum(-1, keepdim=True) / 8 + 1e-5
        return x * v.rsqrt(), x / v.sqrt(), x * v**-0.5, x * torch.pow(w, -0.5), x * (1 / w) ** 0.5, x / v * v.sqrt()

    assert len(set(outputs(lifted(roots, R(4, 8))))) == 1

    def sigmoids(x: Tensor) -> Any:
        return (
            F.silu(x),
            x * torch.sigmoid(x),
            x / (1 + torch.exp(-x)),
            x * (1 / (1 + (-x).exp())),
            x * (1 + (x * -1).exp()).reciprocal(),
        )

    assert len(set(outputs(lifted(sigmoids, R(4, 8))))) == 1


def test_different_values_are_different_terms() -> None:
    def f(x: Tensor) -> Any:
        v = (x * x).mean(-1, keepdim=True)
        return (
            x * (v + 1e-5).rsqrt(),
            x * (v + 1e-6).rsqrt(),
            x / (v + 1e-5),
            x * (v.sqrt() + 1e-5),
            (x * x).sqrt(),
            x.sqrt() ** 2,
            x,
        )

    terms = outputs(lifted(f, R(4, 8)))
    assert len(set(terms)) == len(terms)


def test_layout_vanishes() -> None:
    def f(x: Tensor) -> Any:
        y = x.view(2, 3, 2, 4).transpose(1, 2).contiguous().transpose(1, 2).reshape(6, 8).unsqueeze(0).squeeze(0)
        return x, y, x.t().t(), x.expand(6, 8), x.clone()

    assert len(set(outputs(lifted(f, R(6, 8))))) == 1


def test_casts_vanish_unless_roundings_are_kept() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return y, y.float(), y.float().to(torch.bfloat16)

    args = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 8, dtype=torch.bfloat16)
    assert len(set(outputs(lifted(f, *args)))) == 1
    kept = outputs(lifted(f, *args, rounding=True))
    assert len(set(kept)) == 1 and kept[0].name == "bf16"  # rounding what is rounded changes nothing

    def g(x: Tensor) -> Any:
        return x.float() * 3, (x * 3).float()

    exact, rounded = outputs(lifted(g, args[0], rounding=True))
    assert exact is not rounded and rounded.name == "bf16"
    assert len(set(outputs(lifted(g, args[0])))) == 1


def test_halves_become_lanes_and_rows_do_not() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        gate, up = (x @ w).chunk(2, -1)
        return gate * up, torch.cat([gate, up], -1)

    product, whole = outputs(of := lifted(f, R(6, 4), R(4, 8)))
    assert [c.kind for c in product.args] == ["con", "con"] and {c.lanes[0][1] for c in product.args} == {0, 1}
    assert whole.kind == "lanes"  # its lanes are what the product is made of
    assert list(whole.args) == sorted(product.args, key=lambda c: c.lanes)
    assert len(of.products) == 1

    def rows(x: Tensor, w: Tensor) -> Any:
        return (x @ w)[:3] * 2, (x @ w).select(0, 1) * 2

    (r,) = (Read(g) for g in captured(rows, R(6, 4), R(4, 8)))
    assert all(not t.lanes and t.kind != "lanes" for t in r.lifted.terms)
    assert untrue(r) == []


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: F.linear(x, w.t().contiguous()),
        lambda x, w, b: F.linear(x, w.t().contiguous(), b),
        lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w),
        lambda x, w, b: x @ w,
        lambda x, w, b: x.flatten(0, 1).mm(w),
        lambda x, w, b: x @ w + (x @ w),
    ],
)
def test_every_product_is_found_once(product: Any) -> None:
    of = lifted(product, R(2, 3, 8), R(8, 5), R(5))
    (only,) = of.products.values()
    assert len(only.rows) == 2 and len(only.columns) == 1
    assert [str(s) for s in map(of.reading.axes.size.__getitem__, only.columns)] == ["5"]


def test_what_is_not_understood_is_a_leaf_that_waits_for_its_inputs() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        return (x @ w).cumsum(0) + 1, torch.addmm(x, x, w, alpha=2), (x @ w).sum(0, dtype=torch.float32)

    opaque, scaled, own_dtype = outputs(lifted(f, R(6, 6), R(6, 6)))
    assert opaque.kind == "add" and opaque.args[0].kind == "leaf" and opaque.deps
    assert scaled.kind == "leaf" or scaled.kind == "add"
    assert own_dtype.kind == "leaf"


def test_what_cancels_is_not_zero_where_it_is_infinite() -> None:
    def f(x: Tensor) -> Any:
        return x - x, x * 0, x * 3 - x * 2 - x, x * 1e308 * 1e308

    same, zero, several, overflow = outputs(lifted(f, R(4, 8)))
    assert same.kind == "add" and len(same.args) == 2 and several.kind == "add"
    assert zero.kind == "leaf" and overflow.kind == "leaf"


def test_no_symbol_is_asked() -> None:
    """Symbolic sizes pass through: no guard, and every axis of the batch is a monomial of torch's symbol."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)).relu()

    x = R(6, 5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    (graph,) = captured(f, x, R(8, 8))
    symbols = [n.meta["val"] for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    env = symbols[0].node.shape_env
    before = len(env.guards)
    r = Read(Graph(graph.graph, graph.inputs))
    assert len(env.guards) == before
    assert untrue(r) == []
    assert r.lifted.products and all(
        r.lifted.reading.axes.total(p.rows).static is None for p in r.lifted.products.values()
    )


@pytest.mark.parametrize("which", range(4))
def test_products_have_one_number(which: int) -> None:
    """What a gradient from outside waits for are the products of the forward, also where one of all is not read: then
    none of the backward has its number."""
    graphs: list[fx.Graph] = []
    x, v, w = (R(6, 6).requires_grad_() for _ in range(3))
    capture(lambda x: torch.tanh(x @ v) @ w, (x,), {}, "train", graphs.append)
    (graph,) = graphs
    products = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    made = lift(graph, cut=lambda node: node is products[which])
    assert len(products) > 4 and products[which] not in made.bits
    assert all(product.node in made.bits and made.bits[product.node] == bit for bit, product in made.products.items())
    (tangent,) = (n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name)
    assert made.deps[tangent] == sum(1 << made.bits[n] for n in products[:2] if n in made.bits)
    behind = {product.node for bit, product in made.products.items() if made.deps[tangent] >> bit & 1}
    assert behind == {n for n in products[:2] if n is not products[which]}
