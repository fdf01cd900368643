"""A law that wins narrowly is compared with the whole program that is derived without it, on a machine that is
pretended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Ran, half, pretend, run, streams
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from trained_layers import Layer, trained
from zoo import Norm

from coda_inductor.core.settings import Settings
from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from coda_inductor.patterns.graph import aten
from coda_inductor.tuning.baseline import WithoutLaw
from coda_inductor.tuning.benchmark import Programs
from coda_inductor.tuning.extract import goes_on_with, subgraph
from coda_inductor.tuning.measurements import Measurements
from coda_inductor.tuning.outcome import Outcome

pytestmark = pytest.mark.usefixtures("interpreted")
STATISTICS = (aten.var_mean.correction, aten.mean.dim)
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def narrow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_ms: float, inductor: bool = False
) -> list[tuple[str, ...]]:
    """Pretends a machine on which every group takes 1 ms, Inductor 1.1, and the program without a law so long. The list
    collects what is timed: the contest, the program without a law."""
    pretend(monkeypatch, tmp_path, inductor=inductor)
    seen = list[tuple[str, ...]]()

    def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[Times]:
        for call in calls:
            call()
        if "level" in how:  # its tiles
            return [Times(1.0, 1.0)] * len(calls)
        theirs = 1.1 if "decided" in how else without_ms
        seen.append(("contest",) if "decided" in how else ("without",))
        return [Times(1.0, 1.0), Times(theirs, theirs)]

    monkeypatch.setattr(timing, "compared", compared)
    return seen


def inferred() -> Ran:
    return run(half(torch.bfloat16), *streams(torch.bfloat16))


def deferred(ran: Ran) -> int:
    """How many Regions read an operand that was put off."""
    return sum("bilinearity" in site.laws for report in ran.reports for site in report.sites)


def layers() -> Ran:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer("LayerNorm", "plain", "gelu, tanh", False, True) for _ in range(2)))
    return run(model.bfloat16(), torch.randn(4, 80, 64, dtype=torch.bfloat16))


STEPS: dict[str, Callable[[], Ran]] = {
    "half": inferred,
    "layers": layers,
    "llama": lambda: trained("llama"),
    "gpt": lambda: trained("gpt"),
    "bert": lambda: trained("bert"),
}


def count(graph: fx.Graph, *targets: object) -> int:
    return sum(node.target in targets for node in graph.nodes)


@pytest.mark.parametrize(("name", "regions"), [("half", 1), ("layers", 5), ("llama", 0)])
def test_of_equal_programs_the_law_stays_if_it_leaves_nothing_to_the_backward(
    name: str, regions: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Equal but for what equal calls differ by. A training step makes again what its forward is spared, which no such
    comparison times."""
    narrow(monkeypatch, tmp_path, 0.995)
    assert deferred(STEPS[name]()) == regions


@pytest.mark.parametrize("name", ["half", "layers"])
def test_the_faster_program_is_kept(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for without_ms in (1.01, 0.99):
        with monkeypatch.context() as patch:
            seen = narrow(patch, tmp_path / str(without_ms), without_ms)
            ran = STEPS[name]()
            assert ("without",) in seen
            rows = [row for report in ran.reports for row in report.timings if "against" in row]
            assert rows and all(row["baseline_ms"] == without_ms and row["regions"] != row["against"] for row in rows)
            found.append(deferred(ran))
    assert found[0] > found[1]


def by_a_vector(a: Tensor, b: Tensor) -> bool:
    """Do two tiles differ in every row by the same, a bias?"""
    if a.shape != b.shape or a.dim() != 2:
        return False
    difference = a.double() - b.double()
    return float((difference - difference.mean(0)).norm() / a.double().norm()) < 1e-2


def checked(without: WithoutLaw, programs: Programs, made: list[Callable[[], object]], exact: bool = True) -> int:
    """Runs the steps once more, where what Inductor's programs made is poisoned: equal tensors from equal ones, every
    product and every statistic once. The number of its programs."""
    for (nodes, _), piece in zip(without.wanted, without.pieces, strict=True):
        for node in nodes if piece else ():
            if node.meta["val"].shape[-1] > 1:
                without.rival.values[node].fill_(float("nan"))  # who reads what was made first, fails
    for step in made:
        step()
    graph, given = subgraph(without.group, without.plan)
    tensors = [without.rival.value(node) for node in given]
    wanted = programs.compiled(graph, tensors)(*tensors)
    summed = {node for b in without.rival.builts for node in b.draft.totals}
    for node, value in zip(goes_on_with(without.group, without.plan), wanted, strict=True):
        if without.stored_plain(node):
            tiles = [x for x in without.rival.values.values() if isinstance(x, Tensor)]
            assert not exact or any(by_a_vector(value, x) for x in tiles), node
        elif node not in summed:
            found = without.rival.value(node)
            assert found.shape == value.shape and found.dtype == value.dtype
            assert float((found.double() - value.double()).norm() / value.double().norm()) < 1e-2 or not exact, node
    rest = [piece[0] for piece in without.pieces if piece]
    assert sum(count(p, *MATMULS) for p in rest) + without.rival.mask.bit_count() == count(graph, *MATMULS)
    assert sum(count(p, *STATISTICS) for p in rest) <= count(graph, *STATISTICS)
    return len(rest)


@pytest.mark.sampled
@pytest.mark.parametrize("name", STEPS)
def test_it_makes_what_the_group_stands_for(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """(BERT's Regions make a normalised stream again from sums that are random here, where the user's graph reads
    another random stream.)"""
    narrow(monkeypatch, tmp_path, 1.0, inductor=name in ("half", "llama"))
    seen, whole = list[int](), WithoutLaw.steps

    def steps(self: WithoutLaw, programs: Programs, settings: Settings) -> list[Callable[[], object]]:
        made = whole(self, programs, settings)
        seen.append(checked(self, programs, made, exact=name != "bert"))
        return made

    monkeypatch.setattr(WithoutLaw, "steps", steps)
    STEPS[name]()
    assert seen and min(seen) > 0  # the norm itself, at least


class Twice(torch.nn.Module):
    """A stream that two norms read, and nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.one, self.two = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        self.first, self.second = Norm("hf", 64), Norm("hf", 64)

    def forward(self, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.o(a)
        return torch.tanh(self.one(self.first(h))), torch.sigmoid(self.two(self.second(h)))


def test_what_one_program_makes_another_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Regions of the rival lose, Inductor makes their products, each once, and what is read twice lies there."""
    narrow(monkeypatch, tmp_path, 1.0)
    seen, whole = list[int](), Measurements.against

    def against(self: Measurements, plan: Any, members: Any, other: Any, parts: Any) -> Outcome:
        for some in filter(None, (parts[:1], parts[1:], parts[::2])):
            group = self.group(plan, members)
            with torch.no_grad(), unset_fake_temporarily():
                self.fused(group, plan)
                without = WithoutLaw(group, plan, self.group(other, some), other)
                steps = without.steps(self._programs, self.settings)
                seen.append(checked(without, self._programs, steps))
        return whole(self, plan, members, other, parts)

    monkeypatch.setattr(Measurements, "against", against)
    torch.manual_seed(0)
    run(Twice().bfloat16(), *streams(torch.bfloat16))
    assert max(seen) > 1
    STEPS["half"]()


def test_both_programs_are_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which Regions, and what is left to Inductor."""
    narrow(monkeypatch, tmp_path, 1.0)
    whole, compared = Measurements.against, list[int]()

    def against(self: Measurements, plan: Any, members: Any, other: Any, parts: Any) -> Outcome:
        group = self.group(plan, members)
        one, rival = WithoutLaw(group, plan, self.group(other, parts), other), self.group(other, parts)
        keys = {one.key(Settings()), WithoutLaw(group, plan, rival, other).key(Settings())}
        assert len(keys) == 1
        fewer = WithoutLaw(group, plan, self.group(other, parts[:1]), other)
        fewer.__dict__["pieces"] = one.pieces
        keys.add(fewer.key(Settings()))
        more = WithoutLaw(group, plan, rival, other)
        more.__dict__["pieces"] = [None for _ in one.pieces]
        keys.add(more.key(Settings()))
        compared.append(len(parts))
        assert any(one.pieces) and len(keys) == 2 + (len(parts) > 1)
        return whole(self, plan, members, other, parts)

    monkeypatch.setattr(Measurements, "against", against)
    inferred()
    trained("llama")
    assert max(compared) > 1


def test_its_record_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = narrow(monkeypatch, tmp_path, 0.99)
    first = inferred()
    assert seen.count(("without",)) == 1
    del seen[:]
    again = inferred()
    assert seen == [] and again.reports[0].timings == first.reports[0].timings
    half_model = half(torch.bfloat16)
    half_model.norm.register_forward_hook(lambda module, given, out: out * 2)  # what Inductor makes between them
    run(half_model, *streams(torch.bfloat16))
    assert ("without",) in seen


def test_without_it_the_law_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No memory for the comparison, or no Region that wins alone."""
    narrow(monkeypatch, tmp_path, 0.5)
    assert deferred(inferred()) == 0

    def full(self: WithoutLaw, programs: Programs, settings: Settings) -> list[Callable[[], object]]:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        seen = narrow(patch, tmp_path / "full", 0.5)
        patch.setattr(WithoutLaw, "steps", full)
        assert deferred(inferred()) > 0 and ("without",) not in seen
    with monkeypatch.context() as patch:
        seen = narrow(patch, tmp_path / "alone", 0.5)
        whole = Measurements.outcome

        def outcome(self: Measurements, plan: Any, members: Any) -> Outcome:
            found = whole(self, plan, members)
            lost = not plan.firings
            return Outcome(found.mask, Times(2.0, 2.0), Times(1.0, 1.0)) if lost else found

        patch.setattr(Measurements, "outcome", outcome)
        assert deferred(inferred()) > 0 and ("without",) not in seen


def test_what_the_busy_gpu_may_cost() -> None:
    """What equal calls differ by: 1 %."""
    for busy, kept in ((1.2, True), (1.009, True), (0.9902, True), (0.9899, False), (0.9, False)):  # ours takes 1
        assert (Outcome(1, Times(1.0, 1.0), Times(1.05, busy)).loses == "") is kept
    assert not Outcome(1, Times(1.0, -0.01), Times(1.05, -0.01)).loses  # too small to be told from nothing
    assert Outcome(1, Times(1.0, 1.0), Times(1.019, 2.0)).loses  # the turns must be won
    assert Outcome(1, Times(1.0, math.inf), Times(1.019, math.inf)).loses
