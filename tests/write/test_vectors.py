"""Vectors of tokens written as ATen: sums over tensors of one shape become one sum."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from evaluate import error, strict_reference
from torch import Tensor, fx

from coda_inductor.core.ops import OPS
from coda_inductor.patterns.terms import Term, Terms
from coda_inductor.rewrite.beside import Pair
from coda_inductor.rewrite.space import Computed
from coda_inductor.write.vectors import COMPARISONS, Vectors

TERMS, M, N = Terms(), 6, 4
PAIRS = (("q", "dq"), ("k", "dk"), ("v", "dv"))


class Graph:
    """A graph whose nodes hold values: "q" to "dv" [M, N], "token" [M] and "scalar"."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.graph, self.sums = fx.Graph(), 0
        matrices = {name: torch.randn(M, N) for pair in PAIRS for name in pair}
        self.values: dict[str, Tensor] = {**matrices, "token": torch.randn(M), "scalar": torch.tensor(3.0)}
        self.nodes = {name: self.graph.placeholder(name) for name in self.values}
        for name, node in self.nodes.items():
            node.meta["val"] = self.values[name]
        self.axes = {name: tuple(range(value.dim())) for name, value in self.values.items()}
        self.leaf = {name: TERMS.leaf(name, axes) for name, axes in self.axes.items()}
        reds = [TERMS.red("sum", TERMS.mul(self.leaf[a], self.leaf[b]), (1,), {1: N}) for a, b in PAIRS]
        self.reds = dict(zip("qkv", reds, strict=True))
        self.pairs = {
            red: Pair((self.nodes[a], self.nodes[b]), TERMS.const(1), (1,))
            for red, (a, b) in zip(reds, PAIRS, strict=True)
        }

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.sums += target is torch.ops.aten.sum.dim_IntList
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def written(self, term: Term) -> Tensor:
        reading = SimpleNamespace(roots=lambda node: tuple((i,) for i in self.axes[node.name]))
        lifted = cast(
            Any, SimpleNamespace(node=lambda t: self.nodes[t.name], reading=reading, extents=lambda order: {})
        )
        nothing = cast(Any, None)
        vectors = Vectors(lifted, self.call, lambda s, rows: None, nothing, self.pairs.get, torch.float32)
        return cast(Tensor, vectors.write(Computed(term, "token", (0,))).meta["val"])

    def sum(self, name: str) -> Tensor:
        return (self.values[name] * self.values[f"d{name}"]).sum(1)


@pytest.mark.parametrize("scale", [False, True], ids=["alone", "times a vector"])
@pytest.mark.parametrize("rest", [None, "token", "scalar"])
def test_sums_over_one_shape_are_one_sum(rest: str | None, scale: bool) -> None:
    g = Graph()
    weights = {"q": Fraction(2), "k": Fraction(-3), "v": Fraction(1, 2)}
    addends, signs = [g.reds[n] for n in weights], list(weights.values())
    wanted = sum((g.sum(n) * float(w) for n, w in weights.items()), torch.full((M,), 5.0))
    if rest:
        addends, signs, wanted = [*addends, g.leaf[rest]], [*signs, Fraction(7)], wanted + 7 * g.values[rest]
    term = TERMS.add(*addends, TERMS.const(5), signs=[*signs, Fraction(1)])
    if scale:
        term, wanted = TERMS.mul(term, g.leaf["token"]), wanted * g.values["token"]
    torch.testing.assert_close(g.written(term), wanted)
    assert g.sums == 1


@pytest.mark.parametrize("op", COMPARISONS)
def test_a_choice_keeps_the_order_of_its_arguments(op: str) -> None:
    """Numbers stand where they stood."""
    g = Graph()
    token, scalar, two = g.leaf["token"], g.leaf["scalar"], TERMS.const(2)
    for args in ((token, two, scalar), (token, scalar, two), (token, token, scalar)):
        values = [torch.tensor(2.0) if a is two else g.values[a.name] for a in args]
        torch.testing.assert_close(g.written(TERMS.fn(op, *args)), OPS[op].torch(*values))


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("shape", [(), (8,), (12, 1)])
def test_a_number_beside_a_value(shape: tuple[int, ...]) -> None:
    """Inductor lowers what a number becomes beside a number, a feature's value, or a token's."""
    torch.manual_seed(0)
    x, w, gain = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((12, 8), (8, 8), shape))

    def scaled(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
        return (x @ w) * gain.clamp(min=0.1)

    with strict_reference(run=True):
        compiled = torch.compile(scaled, backend="coda")
        found = torch.autograd.grad(compiled(x, w, gain).sin().sum(), [x, w, gain])
    wanted = torch.autograd.grad(scaled(x, w, gain).sin().sum(), [x, w, gain])
    assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(found, wanted, strict=True))
