"""What stands around a group in a contest: the loops that read what it makes, what must be written for its epilogues,
and what the partitioner saves for the backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from compiling import pretend, run
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, SubclassGetAttrAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.patterns.graph import aten, is_backward
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.schedule import model
from coda_inductor.schedule.memory import Memory
from coda_inductor.schedule.model import saved_names
from coda_inductor.tuning import around, benchmark, measurements
from coda_inductor.tuning.extract import subgraph
from coda_inductor.tuning.group import Group, groups
from coda_inductor.tuning.measurements import Measurements, deferred

B, T, D = 4, 80, 64
SETTINGS = Settings(target="sm_90a", tune="quick")


class Layer(nn.Module):
    """A residual in float32, its norm, and what two products that stay with cuBLAS, as they are batched, make of that:
    each rounds it, as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.norm = nn.Linear(D, D, dtype=torch.bfloat16), nn.LayerNorm(D)
        self.q, self.k = (nn.Parameter(torch.randn(B, D, D, dtype=torch.bfloat16)) for _ in "qk")

    def forward(self, a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = x + self.o(a)
        n = self.norm(h)
        return torch.bmm(n.bfloat16(), self.q), torch.bmm(n.bfloat16(), self.k)


def streams() -> tuple[Tensor, ...]:
    """Attention's output and the residual."""
    return torch.zeros(B, T, D, dtype=torch.bfloat16, requires_grad=True), torch.zeros(B, T, D, requires_grad=True)


Look = Callable[[Plan, list[Group]], None]


def shown(look: Look, model: nn.Module, *args: Tensor, mode: Any = "train") -> None:
    """Shows the groups of a plan in which no law defers anything."""
    mine, seen = Measurements(SETTINGS, torch.device("cpu")), list[Plan]()

    def decide(plan: Plan, builts: list[Built]) -> Limits:
        every = groups(plan, builts)
        if undeferred := sum(deferred(plan, members) for members in every):
            return Limits({}, undeferred)
        look(plan, [mine.group(plan, members) for members in every])
        seen.append(plan)
        return Limits()

    def on_graph(graph: fx.Graph) -> None:
        rewrite_for(graph, SETTINGS, decide)

    capture(model, args, {}, mode, on_graph)
    assert len(seen) == 1


def of_the_layer(look: Callable[[Plan, Group], None]) -> None:
    """Shows the group of the residual."""

    def first(plan: Plan, every: list[Group]) -> None:
        look(plan, next(g for g in every if g.after))

    shown(first, Layer(), *streams())


def count(graph: fx.Graph, *targets: object) -> int:
    return sum(node.target in targets for node in graph.nodes)


STATISTICS, PRODUCTS = (aten.var_mean.correction,), (aten.mm.default, aten.addmm.default)


def test_the_norm_follows_on_both_sides() -> None:
    """Inductor adds a residual in the norm's own kernel; beside a Region the norm still reads what that stored."""

    def look(plan: Plan, group: Group) -> None:
        theirs, (nodes, ours) = subgraph(group, plan)[0], around.after(plan, group)
        assert ours is not None and {n.meta["val"].dtype for n in nodes} >= {torch.bfloat16}
        assert (count(theirs, *STATISTICS), count(theirs, *PRODUCTS)) == (1, 1)
        assert (count(ours[0], *STATISTICS), count(ours[0], *PRODUCTS)) == (1, 0)
        assert not any(map(is_backward, group.after))
        assert {n for n in ours[1] if n in group.builts[0].draft.supplies}  # it reads what the Region stored

    of_the_layer(look)


def test_equal_casts_are_one() -> None:
    """q and k read two equal roundings of the norm, which the partitioner makes one."""

    def look(plan: Plan, group: Group) -> None:
        outputs: Any = subgraph(group, plan)[0].output_node().args[0]
        written = [n for n in outputs if n.meta["val"].dtype == torch.bfloat16]
        assert len(written) > len({*written}) >= 1

    of_the_layer(look)


def test_without_the_loops_the_norm_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard broken."""
    monkeypatch.setattr(around, "following", lambda plan, group: frozenset())
    with pytest.raises(BackendCompilerFailed, match="StopIteration"):
        test_the_norm_follows_on_both_sides()


class Wide(nn.Module):
    """A residual that each loop adds up again, from two tensors of half its width."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(D, D, bias=False, dtype=torch.bfloat16)

    def forward(self, a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = (x.float() + y.float()) + self.o(a).float()
        return made


def wide() -> list[str]:
    """What must be written for the Region."""
    found = list[str]()

    def look(plan: Plan, every: list[Group]) -> None:
        ((nodes, program),) = (around.before(plan, group) for group in every)
        assert (program is None) == (not nodes)
        assert program is None or count(program[0], aten.add.Tensor) == 1
        found.extend(str(n.target) for n in nodes)

    shown(look, Wide(), *(torch.zeros(B, T, D, dtype=torch.bfloat16) for _ in "axy"), mode="infer")
    return found


def test_what_no_tensor_holds_is_written_for_an_epilogue() -> None:
    assert wide() == ["aten.add.Tensor"]


def test_if_it_is_thought_to_be_there_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard broken."""
    monkeypatch.setattr(around, "unwritten", lambda built, plan, group: [])
    assert wide() == []


def test_the_backward_reads_what_is_saved() -> None:
    """The stream normalised, in float32, of which the backward has an equal of its own."""
    graphs = list[fx.Graph]()
    capture(Layer(), streams(), {}, "train", graphs.append)
    (graph,) = graphs
    memory, before = Memory(graph, saved_names(graph)), Memory(graph)
    tiles = [n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].shape[-1:] == (D,)]
    (saved,) = (n for n in tiles if memory.saves(n))
    assert saved.target is aten.mul.Tensor and saved.meta["val"].dtype == torch.float32
    equals = [n for n in tiles if memory.holds(n, late=True) and not memory.holds(n)]
    assert len(equals) == 2 and [is_backward(n) for n in equals] == [False, True] and equals[0] is saved
    assert not any(before.saves(n) or before.holds(n, late=True) for n in equals)
    assert all(memory.of(n) == before.of(n) for n in graph.nodes)


def partitions(monkeypatch: pytest.MonkeyPatch, tune: Any) -> int:
    """How often a contest asks what is saved, for all its groups."""
    asked, whole = list[fx.Graph](), model.saved_names

    def saved(graph: fx.Graph) -> frozenset[str]:
        asked.append(graph)
        return whole(graph)

    monkeypatch.setattr(measurements, "saved_names", saved)
    settings = Settings(target="sm_90a", tune=tune)

    def decide(plan: Plan, builts: list[Built]) -> Limits:
        made = Measurements(settings, torch.device("cpu"))
        for members in groups(plan, builts):
            made.group(plan, members)
        return Limits()

    def on_graph(graph: fx.Graph) -> None:
        rewrite_for(graph, settings, decide)

    capture(Layer(), streams(), {}, "train", on_graph)
    return len(asked)


@pytest.mark.parametrize(("tune", "times"), [("off", 0), ("quick", 1)])
def test_a_contest_asks_once_what_is_saved(monkeypatch: pytest.MonkeyPatch, tune: Any, times: int) -> None:
    assert partitions(monkeypatch, tune) == times


def test_no_rank_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may agree on what is saved; who asks beside the compile asks alone."""
    seen = list[bool]()
    whole = min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        seen.append(functorch_config._sync_decision_cross_ranks)
        return whole(*args, **kwargs)

    monkeypatch.setattr(model, "min_cut_rematerialization_partition", partition)
    graphs = list[fx.Graph]()
    capture(Layer(), streams(), {}, "train", graphs.append)
    with functorch_config.patch(_sync_decision_cross_ranks=True):
        model.partition(graphs[0])
    assert seen == [False]


def test_gradients_of_subclasses_are_the_backwards() -> None:
    """As DTensor's parts are described."""
    graphs = list[fx.Graph]()
    capture(Layer(), streams(), {}, "train", graphs.append)
    (graph,), wanted = graphs, saved_names(graphs[0])
    described = graph.output_node().meta["desc"]
    assert wanted and any(isinstance(d, GradAOTOutput) for d in described)
    parts = [SubclassGetAttrAOTOutput(base=d, attr="_local_tensor") if d is not None else None for d in described]
    graph.output_node().meta["desc"] = parts
    assert model.partition(graph) is not None and saved_names(graph) == wanted


def test_what_cannot_be_known_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list[fx.Graph]()
    capture(Layer(), streams(), {}, "train", graphs.append)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Node was invalid, but is output")

    with monkeypatch.context() as patch:
        patch.setattr(model, "min_cut_rematerialization_partition", fails)
        assert saved_names(graphs[0]) == frozenset()
    del graphs[0].output_node().meta["desc"]
    assert model.partition(graphs[0]) is None and saved_names(graphs[0]) == frozenset()


def test_nothing_is_saved_without_a_backward() -> None:
    graphs = list[fx.Graph]()
    capture(Layer(), tuple(x.detach() for x in streams()), {}, "infer", graphs.append)
    assert saved_names(graphs[0]) == frozenset()


def test_a_store_is_read_as_the_node_lies() -> None:
    """[batch, heads, tokens, head], of rows of tokens."""
    store, graph = torch.randn(B * T, D), fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(B, T, 4, 16, device="meta").transpose(1, 2)
    found = benchmark.as_the_node(store, node)
    assert torch.equal(found, store.view(B, T, 4, 16).transpose(1, 2)) and found.stride() == node.meta["val"].stride()
    node.meta["val"] = torch.empty(B, T, 2 * D, device="meta", dtype=torch.bfloat16)
    assert benchmark.as_the_node(store, node).shape == (B, T, 2 * D)


class Heads(nn.Module):
    """Queries of four heads that lie in rows of tokens, and their sums over tokens, which a loop takes."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.tanh(self.q(x)).view(B, T, 4, 16).transpose(1, 2) * 2
        return q, q.sum(2)


def test_programs_read_what_regions_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uncached: None) -> None:
    pretend(monkeypatch, tmp_path, inductor=True)
    asked, whole = list[fx.Node](), benchmark.as_the_node

    def as_the_node(store: Tensor, node: fx.Node) -> Tensor:
        asked.append(node)
        return whole(store, node)

    monkeypatch.setattr(benchmark, "as_the_node", as_the_node)
    torch.manual_seed(0)
    ran = run(Heads(), torch.randn(B, T, D, dtype=torch.bfloat16))
    assert ran == [] and any(n.meta["val"].dim() == 4 for n in asked)


def test_in_another_order_the_programs_refuse_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uncached: None
) -> None:
    """The guard broken: as they were read once."""
    turned: Callable[..., Tensor] = lambda store, node: store.reshape(node.meta["val"].shape)  # noqa: E731
    monkeypatch.setattr(benchmark, "as_the_node", turned)
    pretend(monkeypatch, tmp_path, inductor=True)
    ran = run(Heads(), torch.randn(B, T, D, dtype=torch.bfloat16))
    assert len(ran) == 1 and "stride" in ran[0]
