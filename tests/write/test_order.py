"""Draws and collectives of a rewritten graph run in the order in which the user's graph has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import Norm
from torch import Tensor, fx

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.records import Report
from coda_inductor.patterns.effects import Effects, ordered
from coda_inductor.write.order import sort

REFERENCE = Settings(target="reference")
D = 64
norm = Norm(D)


def summed(x: Tensor) -> Tensor:
    """Over all ranks, begun and not waited for."""
    return torch.ops._c10d_functional.all_reduce(x, "sum", "0")  # type: ignore[no-any-return]


def waited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)  # type: ignore[no-any-return]


def rewritten(f: Callable[..., Any]) -> tuple[list[str], list[str], Report]:
    """The collectives before and after the rewriting."""
    args = [torch.randn(320, D) for _ in "xy"]
    graphs = list[fx.Graph]()
    capture(f, args, {}, "infer", graphs.append)
    graph = max(graphs, key=lambda g: len(g.nodes))  # not one that an operation holds
    before = [node.name for node in graph.nodes if ordered(node)]
    report = rewrite_for(graph, REFERENCE)
    return before, [node.name for node in graph.nodes if ordered(node)], report


def after_a_product(x: Tensor, y: Tensor) -> Any:
    """The first waits for a Region, the second for nothing."""
    return waited(summed(torch.relu(x @ x.mT @ y))), waited(summed(y))


def overlapping(x: Tensor, y: Tensor) -> Any:
    """Two are begun before the first is waited for."""
    first, second = summed(torch.sigmoid(x.mT @ y)), summed(y)
    return waited(first) * 2, waited(second) + 1


def like_a_layer(x: Tensor, y: Tensor) -> Any:
    """Products stand before, between and after collectives."""
    h = y + waited(summed(torch.relu(x.mT @ y) @ y.mT).mT.contiguous())
    return waited(summed(torch.tanh(norm(h).mT @ x))), waited(summed(torch.tanh(h.mT @ x)))


@torch.library.custom_op("coda_test::all_gather", mutates_args=())
def gathered(x: Tensor) -> Tensor:
    """Another library's collective, as far as a graph tells."""
    return x.clone()


@gathered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def of_another_library(x: Tensor, y: Tensor) -> Any:
    return gathered(torch.relu(x.mT @ y)), gathered(y), gathered(x)


def in_a_condition(x: Tensor, y: Tensor) -> Any:
    """An operation that holds a graph; what it does is not looked at."""

    def chosen(z: Tensor) -> Any:
        return torch.cond(z.sum() > 0, torch.sin, torch.cos, (z,))

    return chosen(torch.relu(x.mT @ y)), chosen(y), gathered(x)


FUNCTIONS = [after_a_product, overlapping, like_a_layer, of_another_library, in_a_condition]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_collectives_keep_their_order(f: Callable[..., Any]) -> None:
    before, after, report = rewritten(f)
    assert len(before) >= 3 and report.sites
    assert after == before


def apart(x: Tensor, y: Tensor) -> Any:
    """The first collective waits for what one Region stores, and what else it would store for the second."""
    p = x.mT @ y
    first = summed(p)
    second = waited(summed(y.mT @ y))
    return waited(first), torch.relu(p + second)


def drawn(x: Tensor, y: Tensor) -> Any:
    """As `apart`, with numbers drawn by what the product says."""
    p = torch.sigmoid(x.mT @ y)
    return torch.bernoulli(p), torch.relu(p + torch.rand_like(p))


@pytest.mark.parametrize("f", [apart, drawn], ids=lambda f: f.__name__)
def test_an_epilogue_does_not_wait_for_what_is_ordered_behind_it(f: Callable[..., Any]) -> None:
    before, after, report = rewritten(f)
    assert len(before) >= 2 and after == before
    if f is apart:
        assert not report.sites and any("runs later" in r.reason for r in report.refused)
    else:
        assert len(report.sites) == 1


def graph(*edges: tuple[str, str]) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph of all_reduces, one for each name: the second of two names reads the first, whatever their order."""
    made = fx.Graph()
    x = made.placeholder("x")
    names = sorted({name for edge in edges for name in edge})
    op = torch.ops._c10d_functional.all_reduce.default
    nodes = {name: made.create_node("call_function", op, (x, "sum", "0"), name=name) for name in names}
    made.output([*nodes.values()])
    for source, reader in edges:
        nodes[reader].args = (nodes[source], "sum", "0")
    return made, nodes


def test_what_waits_for_itself_is_a_bug() -> None:
    made, _ = graph(("a", "b"), ("b", "c"), ("c", "a"))
    with pytest.raises(BrokenInvariant):
        sort(made, Effects(("b",)))


def test_an_order_that_cannot_be_kept_is_refused() -> None:
    made, _ = graph(("a", "b"))
    with pytest.raises(Unsupported, match="would run in another order"):
        sort(made, Effects(("b", "a")))


def test_a_collective_that_nobody_reads_stays() -> None:
    made, nodes = graph(("a", "b"))
    made.output_node().args = ([],)
    sort(made, Effects(("a", "b")))
    assert [n for n in made.nodes if n.op == "call_function"] == [nodes["a"], nodes["b"]]


def test_sorted_nodes_stay_where_they_are() -> None:
    made, nodes = graph(("b", "a"), ("c", "d"))
    sort(made, Effects(tuple("bacd")))
    assert [n for n in made.nodes if n.op == "call_function"] == [nodes[name] for name in "bacd"]
