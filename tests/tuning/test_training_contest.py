"""Contests of a training graph, on a machine that is pretended: what they are given, and what follows from losing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from compiling import pretend, run
from torch import Tensor, fx, nn
from trained_layers import trained

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import library, prebuild
from coda_inductor.measure import timing
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.extract import put_off, subgraph
from coda_inductor.tuning.group import Group
from coda_inductor.tuning.key import key_of
from coda_inductor.tuning.measurements import Measurements, deferred
from coda_inductor.tuning.outcome import FREE, SLOW, Outcome

pytestmark = pytest.mark.usefixtures("interpreted")
Measure = Callable[[Measurements, Group, Plan], dict[str, Any]]


def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, baseline: Callable[[Group, Plan], float]) -> list[Any]:
    """Pretends a machine on which ours takes 1 ms and Inductor's `baseline`; the list collects what is measured: is it
    of the backward, what is given, and what is put off."""
    pretend(monkeypatch, tmp_path)
    seen: list[Any] = []

    def measure(self: Measurements, group: Group, plan: Plan) -> dict[str, Any]:
        given = [n.meta["val"] for n in subgraph(group, plan)[1]]
        seen.append((plan.program.in_backward(group.builts[0].draft.space), given, put_off(group, plan)))
        monkeypatch.setattr(timing, "compared", partial(times, baseline(group, plan)))
        return whole(self, group, plan)

    def times(theirs: float, calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[timing.Times]:
        times = [1.0, theirs] if len(calls) == 2 else [1.0 + i for i in range(len(calls))]
        return [timing.Times(ms, ms) for ms in times]

    whole: Measure = Measurements.measure
    monkeypatch.setattr(Measurements, "measure", measure)
    return seen


def partitioned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """Every forward and backward that Inductor compiles."""
    found = []
    whole = torch._inductor.compile_fx.min_cut_rematerialization_partition  # type: ignore[attr-defined]

    def partition(*args: Any, **kwargs: Any) -> Any:
        found.append(whole(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(torch._inductor.compile_fx, "min_cut_rematerialization_partition", partition)
    return found


def means(module: fx.GraphModule) -> int:
    return sum(node.target is torch.ops.aten.mean.dim for node in module.graph.nodes)


def hosts(group: Group) -> bool:
    """Does an epilogue make again what the forward had?"""
    return any(s.again for b in group.builts for s in b.draft.supplies.values())


def test_both_sides_read_what_lies_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tile in float32, though the backward's sigmoid is one; and what a gradient needs of a norm is its operand."""
    seen = timed(monkeypatch, tmp_path, lambda group, plan: 2.0)
    trained("llama")
    assert len(seen) > 8
    for _, given, _ in seen:
        assert {t.dtype for t in given if t.dim() > 1 and t.shape[-1] > 1} <= {torch.bfloat16}
    assert [bool(spared) for late, _, spared in seen if late] == [False] * sum(late for late, _, _ in seen)
    assert sum(bool(spared) for _, _, spared in seen) == 3


def test_a_norm_that_no_epilogue_makes_again_is_recomputed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forward takes its statistics in epilogues all the same, but for the first norm, which follows no product.
    (What loses is kept if those who read its sums win more.)"""
    timed(monkeypatch, tmp_path, lambda group, plan: 0.5 if hosts(group) else 1.3)
    halves = partitioned(monkeypatch)
    (report,) = trained("llama").reports
    (forward, backward) = next(pair for pair in halves if "region" in str(pair[0].graph))
    assert means(forward) == 1 and means(backward) == 3
    assert sum("bilinearity" in site.laws for site in report.sites) == 5


def test_without_the_exception_a_norm_stays_in_the_forward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The guard broken: what the backward asks for undoes the law."""
    monkeypatch.setattr(Plan, "put_off", lambda self: set())
    with pytest.raises(AssertionError, match="means"):
        test_a_norm_that_no_epilogue_makes_again_is_recomputed(monkeypatch, tmp_path)


def test_what_a_law_gains_is_timed_in_a_busy_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless it wins very clearly by turns: where it wins narrowly it is compared with the program without the law."""
    pretend(monkeypatch, tmp_path)
    asked, law, whole = list[tuple[bool, list[bool]]](), [False], Measurements.measure

    def measure(self: Measurements, group: Group, plan: Plan) -> dict[str, Any]:
        law[:] = [bool(deferred(plan, group.builts))]
        found = whole(self, group, plan)
        law[:] = [False]
        return found

    def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[timing.Times]:
        if "level" not in how:  # not its tiles
            asked.append((law[0], [how["decided"]([1.0, theirs]) for theirs in (1.01, 1.14, 1.16, 1.29, 1.31)]))
        return [timing.Times(1.0 + i, 1.0 + i) for i in range(len(calls))]

    monkeypatch.setattr(Measurements, "measure", measure)
    monkeypatch.setattr(timing, "compared", compared)
    trained("llama")
    laws, others = ({tuple(found) for law, found in asked if law is late} for late in (True, False))
    assert laws == {(True, False, False, False, True)} and others == {(True, False, True, True, True)}


@pytest.mark.parametrize("bursts", [(1.02, 0.98, 0.97), (1.02, 0.98, 1.03)])
def test_one_burst_undoes_no_law_narrowly(
    bursts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of three the median counts, and what equal calls differ by does not."""
    pretend(monkeypatch, tmp_path)
    ours = itertools.cycle(bursts)

    def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[timing.Times]:
        if how:  # tiles, and groups against Inductor
            return [timing.Times(1.0 + 0.1 * i, 1.0 + 0.1 * i) for i in range(len(calls))]
        return [timing.Times(1.0, 2 * next(ours) - 1.0), timing.Times(1.0, 1.0)]

    monkeypatch.setattr(timing, "compared", compared)
    (report,) = trained("llama").reports
    assert sum("bilinearity" in site.laws for site in report.sites) == (5 if sorted(bursts)[1] < 1.01 else 0)


@pytest.mark.parametrize("loses", [True, False])
def test_what_a_losing_law_takes_along_is_not_measured(
    loses: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Losers change other Regions, which are measured when the laws are settled: those may change them again."""

    def over_tokens(group: Group) -> bool:
        return any(r.over == "M" for b in group.builts for r in b.region.reductions)

    timed(monkeypatch, tmp_path, lambda group, plan: 0.5 if over_tokens(group) else 1.1)
    outcome = Outcome(0, SLOW, FREE) if loses else Outcome(0, FREE, SLOW)
    monkeypatch.setattr(Measurements, "against", lambda self, plan, members, other, parts: outcome)
    changed = list[tuple[bool, bool]]()
    whole: Measure = Measurements.measure

    def measure(self: Measurements, group: Group, plan: Plan) -> dict[str, Any]:
        changed.append((bool(plan.program.limits.banned), bool(plan.program.undeferred)))
        assert self.key(plan, group) == key_of(group, plan, self.settings)
        return whole(self, group, plan)

    monkeypatch.setattr(Measurements, "measure", measure)
    trained("llama")
    assert set(changed) == {(False, False), (True, True)} | (set() if loses else {(True, False)})


def swapped(job: prebuild.Job) -> bool:
    return isinstance(job, prebuild.Job) and job.swapped


def test_what_takes_over_is_compiled_while_laws_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What loses without a law is known by then. Where the laws lose, no kernel is left to compile, but those of what
    is kept for weights in the other order."""
    timed(monkeypatch, tmp_path, lambda group, plan: 0.5 if late(group, plan) else 1.1)
    monkeypatch.setattr(Measurements, "against", lambda self, plan, members, other, parts: Outcome(0, SLOW, FREE))
    begun, before, turned = list[tuple[bool, int]](), list[tuple[bool, int]](), dict[str, bool]()
    measured, begin = Measurements.measure, prebuild.begin

    def late(group: Group, plan: Plan) -> bool:
        return plan.program.in_backward(group.builts[0].draft.space)

    def counted(jobs: Sequence[prebuild.Job], cache_dir: str, over: threading.Event | None) -> Any:
        orders = {swapped(job) for job in jobs}
        if orders == {True}:
            turned.update((job.region.digest, over is not None) for job in jobs if isinstance(job, prebuild.Job))
        elif orders:
            assert orders == {False}
            begun.append((over is not None, len(jobs)))
        return begin(jobs, cache_dir, over=over)

    def measure(self: Measurements, group: Group, plan: Plan) -> dict[str, Any]:
        before.append((bool(deferred(plan, group.builts)), len(begun)))
        return measured(self, group, plan)

    monkeypatch.setattr(prebuild, "begin", counted)
    monkeypatch.setattr(Measurements, "measure", measure)
    trained("llama")
    # The first plan's, ahead, and what losers changed: twice they are tried without what they make again.
    assert [idle for idle, _ in begun] == [False, True, True, True, True]
    assert before[0] == (False, 1) and {n for law, n in before if law} == {2, 4, 5}
    # What is kept and has two weights, for weights that lie in the other order, too.
    assert turned == dict.fromkeys(pairs_kept(), True) != {}


@pytest.mark.parametrize("wins", [True, False])
def test_the_backwards_regions_are_counted(wins: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that were derived first, and of these the kept ones."""

    def ratio(group: Group, plan: Plan) -> float:
        return 1.3 if wins or not plan.program.in_backward(group.builts[0].draft.space) else 0.5

    timed(monkeypatch, tmp_path, ratio)
    (report,) = trained("llama").reports
    kept, derived = report.backward
    assert derived > 4 and kept == (derived if wins else 0) and len(report.sites) > kept


def test_what_loses_is_not_compiled_for_the_other_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pair(group: Group) -> bool:
        return any(len(b.region.products) == 2 for b in group.builts)

    def ratio(group: Group, plan: Plan) -> float:
        lost.append(pair(group))
        return 0.5 if pair(group) else 1.1

    timed(monkeypatch, tmp_path, ratio)
    lost, begin = list[bool](), prebuild.begin

    def seen(jobs: Sequence[prebuild.Job], cache_dir: str, over: threading.Event | None) -> Any:
        assert not any(swapped(job) for job in jobs)
        return begin(jobs, cache_dir, over=over)

    monkeypatch.setattr(prebuild, "begin", seen)
    trained("llama")
    assert any(lost)


def test_what_is_on_disk_is_not_compiled_for_the_other_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed(monkeypatch, tmp_path, lambda group, plan: 1.1)
    asked, begin = list[bool](), prebuild.begin

    def seen(jobs: Sequence[prebuild.Job], cache_dir: str, over: threading.Event | None) -> Any:
        asked.extend(swapped(job) for job in jobs)
        return begin(jobs, cache_dir, over=over)

    monkeypatch.setattr(prebuild, "begin", seen)
    monkeypatch.setattr(library, "kept", lambda region, config, directory, **how: True)
    trained("llama")
    assert pairs_kept() and asked and not any(asked)


def pairs_kept() -> set[str]:
    """The Regions of two weights that the last graph runs."""
    regions = [site.region for site in REPORTS[-1].sites]
    return {r.digest for r in regions if len(r.products) == 2 and not r.half}


class Packed(nn.Module):
    """Gate and up of one product, as in Phi-3, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.down = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(up * nn.functional.silu(gate))  # type: ignore[no-any-return]


def test_a_split_is_cut_out_of_the_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = timed(monkeypatch, tmp_path, lambda group, plan: 2.0)
    model, x = nn.Sequential(Packed(), Packed()).bfloat16(), torch.randn(4, 80, 64, dtype=torch.bfloat16)
    ran = run(model, x.requires_grad_(), grad=True)
    assert ran == [] and len(ran.reports[0].sites) > 3 and seen


class Gpt(nn.Module):
    """Two layers of transformers' GPT-2 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 128, "attn_implementation": "sdpa"}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)).bfloat16()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def test_no_more_is_kept_where_the_backward_is_left_to_inductor() -> None:
    """The forward's epilogue stores the product and its GELU, and no tanh that a loop of the backward can make."""

    def forward_only(plan: Plan, builts: list[Built]) -> Limits:
        fired, banned, undeferred = {f.product for f in plan.firings}, dict[int, str](), 0
        for b in builts:
            for acc in b.draft.space.accs:
                if plan.program.in_backward(b.draft.space):
                    banned[acc.bit] = "lost"
                elif acc.bit in fired:
                    undeferred |= 1 << acc.bit
        return Limits(banned, undeferred)

    ids = torch.zeros(4, 96, dtype=torch.long)
    rewrite = partial(rewrite_for, decide=forward_only)
    totals = explain(Gpt(), (ids,), {}, "train", Settings(target="sm_90a"), rewrite)["totals"]
    assert totals["regions"] >= 4 and totals["saved_bytes"] <= totals["saved_bytes_inductor"]


def test_a_product_is_not_kept_with_its_bias_and_without() -> None:
    """Of a norm that stays in the forward the backward's sums read the product that follows without its bias, and
    GELU's derivative with it: the forward stores it once."""
    stored = list[int]()

    def undeferred(plan: Plan, builts: list[Built]) -> Limits:
        late = sum(1 << bit for bit in {f.product for f in plan.firings} - {-1} - set(plan.program.undeferred))
        if not late:
            mlp = [b for b in builts if b.region.n == 256 and not plan.program.in_backward(b.draft.space)]
            stored.extend(len(b.region.stores) for b in mlp)
        return Limits({}, late)

    ids = torch.zeros(4, 96, dtype=torch.long)
    rewrite = partial(rewrite_for, decide=undeferred)
    explain(Gpt(), (ids,), {}, "train", Settings(target="sm_90a"), rewrite)
    assert stored == [2, 2]
