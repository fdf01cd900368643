"""The look at a graph after each rewriting: every rule of it finds the fault that it is there for.

A faulty rewriting is planted into torch.compile; STRICT raises what the verifier finds. Without the rule the same
fault goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE
from effect_reads import scale_
from torch import Tensor, fx

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor import joint
from coda_inductor.ops.custom import STORED
from coda_inductor.passes.tables import put_into_memory
from coda_inductor.patterns.graph import aten
from coda_inductor.write import verifying
from coda_inductor.write.kept import keep, store

D = 64
Fault = Callable[[fx.Graph], None]


def zeroed(a: Tensor, r: Tensor, w: Tensor) -> Any:
    """Reads r, overwrites it, and draws twice."""
    h = torch.relu(r + a @ w)
    r.zero_()
    return h, h[:], torch.rand_like(h), torch.bernoulli(torch.sigmoid(a))


def mean(a: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Reads m in the forward, and updates it there."""
    h = torch.sigmoid(a @ w - m[0])
    with torch.no_grad():
        m.lerp_(a, 0.5)
    return h


def scaled(a: Tensor, m: Tensor, w: Tensor) -> Any:
    """What was read of m is needed after an operation of the user's has overwritten it."""
    h = torch.tanh(m)
    scale_(m, 0.5)
    return torch.sigmoid(h), torch.relu(a @ w)


def find(graph: fx.Graph, target: object) -> fx.Node:
    found: fx.Node = next(n for n in graph.nodes if n.target is target)
    return found


def write_first(graph: fx.Graph) -> None:
    inputs = graph.find_nodes(op="placeholder")
    node, zero = find(graph, aten.copy_.default), find(graph, aten.full.default)
    inputs[-1].append(zero)
    zero.append(node)


def swap_draws(graph: fx.Graph) -> None:
    draws = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    first, second = draws[:2]
    second.append(first)


def lose_the_write(graph: fx.Graph) -> None:
    graph.erase_node(find(graph, aten.copy_.default))


def copy_a_view(graph: fx.Graph) -> None:
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        values[1] = graph.call_function(aten.clone.default, (values[1],))
    values[1].meta["val"] = values[1].args[0].meta["val"].clone()
    output.args = (values,)


def read_again(graph: fx.Graph) -> None:
    """What waits for a gradient reads m itself."""
    m = find(graph, aten.copy_.default).args[0]
    gradient = next(n for n in graph.nodes if "tangents" in n.name and n.op == "placeholder")
    with graph.inserting_after(gradient):
        new = graph.call_function(aten.add.Tensor, (gradient, m))
    new.meta["val"] = gradient.meta["val"].clone()
    gradient.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def store_nothing(graph: fx.Graph) -> None:
    node = find(graph, STORED)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


FAULTS: dict[str, tuple[Callable[..., Any], Fault]] = {
    "sides": (zeroed, write_first),
    "chained": (zeroed, swap_draws),
    "writes": (zeroed, lose_the_write),
    "shared": (zeroed, copy_a_view),
    "kept": (mean, read_again),
    "stored": (scaled, store_nothing),
}
LAST = {"kept": ("keep", keep), "stored": ("store", store)}
"""Of faults that happen after all other rewritings."""


def planted(rule: str, patch: pytest.MonkeyPatch) -> None:
    """Rewrites the program with its fault, which happens after the Regions are in the graph or, of copies, at last."""
    program, fault = FAULTS[rule]
    place, original = LAST.get(rule, ("put_into_memory", put_into_memory))

    def faulty(graph: fx.Graph, *args: Any) -> Any:
        found = original(graph, *args)
        fault(graph)
        return found

    patch.setattr(joint, place, faulty)
    args = [torch.randn(320, D), torch.randn(320, D), torch.randn(D, D)]
    graphs = list[fx.Graph]()
    if rule in LAST:
        args = [a.requires_grad_(i != 1) for i, a in enumerate(args)]
        capture(program, args, {}, "train", graphs.append)
    else:
        capture(program, args, {}, "infer", graphs.append)
    (graph,) = graphs
    assert rewrite_for(graph, Settings(**REFERENCE)).sites


@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_finds_its_fault(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokenInvariant):
        planted(rule, monkeypatch)


@pytest.mark.parametrize("rule", FAULTS)
def test_no_other_rule_finds_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule in LAST:
        monkeypatch.setattr(joint, "verify_kept", lambda graph: None)
    else:
        monkeypatch.setattr(verifying, rule, lambda graph, before: "")
    planted(rule, monkeypatch)


def test_memory_read_after_a_write_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that writes in its middle, as chained passes may leave: what is read behind the write stays there, and
    nobody new reads that memory."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    first = graph.call_function(aten.relu.default, (x,))
    write = graph.call_function(aten.mul_.Tensor, (x, 2.0))
    second = graph.call_function(aten.relu.default, (x,))
    graph.output((first, second))
    for node, value in zip((x, w, first, write, second), torch.randn(5, 4, 4), strict=True):
        node.meta["val"] = value
    write.meta["val"] = x.meta["val"]
    before = verifying.Before.of(graph)
    assert before.effects.unstable == {"x"} and before.effects.behind == {(second.name, write.name)}
    verifying.verify(graph, before, "nothing")
    with graph.inserting_before(first):
        new = graph.call_function(aten.neg.default, (x,))
    new.meta["val"] = -x.meta["val"]
    first.args = (new,)
    with pytest.raises(BrokenInvariant, match="reads memory that is overwritten"):
        verifying.verify(graph, before, "a pass")
    monkeypatch.setattr(verifying, "overwritten", lambda graph, before: "")
    verifying.verify(graph, before, "a pass")


def test_an_item_is_read_from_memory() -> None:
    """A number has no storage of its own, but whoever takes it out of a tensor reads that."""
    graph = fx.Graph()
    x, m = graph.placeholder("x"), graph.placeholder("m")
    write = graph.call_function(aten.copy_.default, (m, x))
    item = graph.call_function(aten._local_scalar_dense.default, (m,))
    size = graph.call_function(aten.sym_size.int, (m, 0))
    graph.output((item, size))
    for node in (x, m, write):
        node.meta["val"] = torch.randn(4, 4)
    before = verifying.Before.of(graph)
    assert before.effects.behind == {(item.name, write.name)} and before.effects.unstable == {"m"}
    m.append(item)
    with pytest.raises(BrokenInvariant, match="changed places"):
        verifying.verify(graph, before, "a pass")
