"""Contests over sums that one Region takes for another: who is kept for whom, and what a sum beside a product costs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import pretend
from torch import Tensor, fx, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.records import Report
from coda_inductor.measure.timing import Times
from coda_inductor.plan.build import build
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning import benchmark
from coda_inductor.tuning.extract import small, subgraph
from coda_inductor.tuning.group import Group, computed, groups, mask, readers, tied
from coda_inductor.tuning.measurements import Measurements, deferred
from coda_inductor.tuning.outcome import Outcome, borne, recorded, together
from coda_inductor.tuning.tuner import Tuner


def outcome(fused: float, baseline: float) -> Outcome:
    return Outcome(1, Times(fused, fused), Times(baseline, baseline))


@pytest.mark.parametrize(
    ("times", "reads", "kept"),
    [
        ([(1.0, 0.95), (1.0, 1.5)], {0: {1}}, {0}),
        ([(1.0, 0.95), (1.0, 1.5)], {}, set()),  # nobody reads them
        ([(1.0, 0.95), (1.0, 1.03)], {0: {1}}, set()),  # both together win nothing
        ([(1.0, 0.5), (1.0, 1.5)], {0: {1}}, set()),
        ([(1.0, 0.95), (1.0, 0.9), (1.0, 1.5)], {0: {1}, 1: {2}}, {0, 1}),  # by way of another
        ([(1.0, 0.95), (1.0, 0.9), (1.0, 1.0)], {0: {1}, 1: {2}}, set()),
        ([(1.0, 0.8), (1.0, 0.8), (1.0, 1.3)], {0: {2}, 1: {2}}, {1}),  # no gain bears both
        ([(1.0, 0.9), (1.0, 0.9), (1.0, 1.3)], {0: {2}, 1: {2}}, {0, 1}),
        ([(1.0, 1.5), (1.0, 1.5)], {0: {1}}, set()),  # no loser
    ],
)
def test_a_loser_is_kept_for_who_reads_its_sums(
    times: list[tuple[float, float]], reads: dict[int, set[int]], kept: set[int]
) -> None:
    outcomes = {i: outcome(*t) for i, t in enumerate(times)}
    losers = [i for i, o in outcomes.items() if o.loses]
    assert borne(outcomes, losers, [reads.get(i, set()) for i in outcomes]) == kept


def test_what_turns_alone_decided_is_added_up() -> None:
    both = together([Outcome(1, Times(1.0, 2.0), Times(3.0, 4.0)), Outcome(4, Times(0.5, 0.5), Times(1.0, 1.0))])
    assert both == Outcome(5, Times(1.5, 2.5), Times(4.0, 5.0))


def test_who_is_judged_together() -> None:
    """Whoever reads sums of another, in either direction and from one to the next."""
    chain = [{1}, {2}, set(), {4}, set()]
    assert tied(chain, {0}) == tied(chain, {1}) == tied(chain, {2}) == {0, 1, 2}
    assert tied(chain, {3}) == {3, 4} and tied(chain, set()) == set()


class GPT(nn.Module):
    """A layer as GPT-2 has it ("plain"); with one key for all heads and its "rotary" embedding; with a "gate" on
    attention that q's product makes, too; with "norms" of q and k; or with the MLP in "parallel", from one product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.LayerNorm(64), nn.LayerNorm(64)
        self.sizes = {"rotary": [64, 16, 16], "gate": [64] * 4, "parallel": [64, 64, 64, 512]}.get(kind, [64] * 3)
        self.qkv, self.o = nn.Linear(64, sum(self.sizes)), nn.Linear(64, 64)
        wide = max(128, self.sizes[-1])
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(wide, 64), nn.RMSNorm(16, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *more = self.qkv(self.first(x)).split(self.sizes, -1)
        q, k, v = (t.view(4, 80, -1, 16).transpose(1, 2) for t in (q, k, v))
        if self.kind == "rotary":
            angles = torch.arange(80)[:, None] / 10.0 ** torch.arange(16)
            first, second = k.chunk(2, -1)
            k = k * angles.cos().bfloat16() + torch.cat((-second, first), -1) * angles.sin().bfloat16()
            k, v = k.expand(q.shape), v.expand(q.shape)
        if self.kind == "norms":
            q, k = self.norm(q), self.norm(k)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 80, 64)
        if self.kind == "parallel":
            return x + self.o(out) + self.down(F.gelu(more[0]))  # type: ignore[no-any-return]
        x = x + self.o(out * torch.sigmoid(more[0]) if more else out)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))  # type: ignore[no-any-return]


def judged(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    look: Callable[[Measurements, Group, Plan, bool], float],
    *,
    kind: str = "plain",
) -> Report:
    """Rewrites a training graph on a machine that is pretended, where ours takes 1 ms and Inductor what `look` says. It
    is told whether other groups read sums of this one, that no law deferred."""
    pretend(monkeypatch, tmp_path)
    every, found = list[list[Built]](), list[Report]()
    whole: Callable[..., Limits] = Tuner.__call__

    def judge(self: Tuner, plan: Plan, builts: list[Built]) -> Limits:
        every[:] = groups(plan, builts)
        return whole(self, plan, builts)

    def measure(self: Measurements, group: Group, plan: Plan) -> dict[str, Any]:
        made = {b.draft.space.mask for i, others in enumerate(readers(every)) if others for b in every[i]}
        makes = not deferred(plan, group.builts) and group.mask in made
        with self.real_tensors():
            theirs = look(self, group, plan, makes)
        return recorded(group.digests, [Times(1.0, 1.0), Times(theirs, theirs)])

    monkeypatch.setattr(Tuner, "__call__", judge)
    monkeypatch.setattr(Measurements, "measure", measure)
    monkeypatch.setattr(Measurements, "prepare", lambda *_: None)
    monkeypatch.setattr(Measurements, "against", lambda *_: Outcome(0))
    torch.manual_seed(0)
    model = nn.Sequential(GPT(kind), GPT(kind)).bfloat16()
    settings = Settings(target="sm_90a", cache_dir=str(tmp_path))
    tuner = Tuner(settings, torch.device("cpu"), print)
    capture(model, (torch.randn(4, 80, 64, dtype=torch.bfloat16),), {}, "train",
            lambda graph: found.append(rewrite_for(graph, settings, tuner)))  # fmt: skip
    return found[0]


@pytest.mark.sampled
@pytest.mark.parametrize(("readers_win", "kept"), [(2.0, True), (1.03, False)])
def test_a_maker_of_sums_that_loses_narrowly(
    readers_win: float, kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GELU's backward takes the sums of the norm's before it."""
    lost = set[str]()

    def look(measurements: Measurements, group: Group, plan: Plan, makes: bool) -> float:
        lost.update(group.digests if makes else ())
        return 0.95 if makes else readers_win

    report = judged(monkeypatch, tmp_path, look)
    assert lost and bool(lost & {site.region.digest for site in report.sites}) is kept


def test_who_shares_sums_is_judged_in_one_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where one is known from an earlier plan and the other is not: else a loser would be banned before its
    reader is measured."""
    judge, chance, apart = Tuner.verdict_on, random.Random(3), [0, 0]

    def together_in(self: Tuner, plan: Plan, candidates: list[list[Built]]) -> Limits:
        every = groups(plan, [build(plan, draft) for draft in plan.unique()])
        here = {i for i, members in enumerate(every) if mask(members) in map(mask, candidates)}
        apart[0] += 0 < len(here) < len(every)
        assert all(i in here or not others & here for i, others in enumerate(readers(every)))
        assert all(others <= here for i, others in enumerate(readers(every)) if i in here)
        apart[1] += any(readers(every)[i] for i in here)
        return judge(self, plan, candidates)

    monkeypatch.setattr(Tuner, "verdict_on", together_in)
    judged(monkeypatch, tmp_path, lambda measurements, group, plan, makes: 0.5 if chance.random() < 0.15 else 2.0)
    assert min(apart) > 1


def outputs(graph: fx.Graph) -> int:
    (out,) = (n for n in graph.nodes if n.op == "output")
    return len(out.args[0])


@pytest.mark.parametrize("kind", ["plain", "rotary"])
def test_a_sum_that_a_loop_takes_costs_what_it_reads_beside(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sums over gradients of q, k and v are part of the loop that puts these together: both sides run it, and the
    sums are as they were. It reads sines from memory, as the program does in the end."""
    seen = set[str]()

    def run(plan: Plan, group: Group, built: Built) -> tuple[list[object], list[Tensor]]:
        graph, keys = small(plan, group, built, group.computed(built))
        given = [group.value(k) if isinstance(k, fx.Node) else group.made(k) for k in keys]
        return keys, fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*given)

    def look(measurements: Measurements, group: Group, plan: Plan, makes: bool) -> float:
        if group.taken:
            (built,) = group.builts
            found = run(plan, group, built)[1]
            made = dict(zip(group.taken, found[-len(group.taken) :], strict=True))
            alone = dataclasses.replace(group, taken=(), loops=set(), values=group.values | made)
            read, wanted = run(plan, alone, built)
            assert {k for k in read if isinstance(k, fx.Node)} & {n for t in group.taken for n in (t, *t.users)}
            for x, y in zip(found[: -len(group.taken)], wanted, strict=True):
                torch.testing.assert_close(x, y)
            (ours, given), (before, _) = subgraph(group, plan), subgraph(alone, plan)
            assert outputs(ours) == outputs(before) + len(group.taken) and not {*group.taken} & {*given}
            seen.update(str(n.target) for graph in (small(plan, group, built, [])[0], ours) for n in graph.nodes)
        return 0.5 if makes else 2.0

    judged(monkeypatch, tmp_path, look, kind=kind)
    assert "aten.cat.default" in seen and ("aten.neg.default" in seen) is (kind == "rotary")
    assert not seen & {"aten.cos.default", "aten.sin.default"}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["plain", "gate", "norms", "parallel"])
def test_which_loops_take_sums(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None that an epilogue stands for, and none that runs before what is summed is there; parts of a split may go to
    attention. Whatever loses, both sides can be written."""
    taken, chance = set[str](), random.Random()

    def look(measurements: Measurements, group: Group, plan: Plan, makes: bool) -> float:
        supplied = {n for draft in plan.unique() for n in draft.supplies}
        assert not supplied & {*group.taken}
        for node in group.taken:
            taken.add(str(node.target))
            assert not any(n in supplied and n.target is not torch.ops.aten.view.default for n in group.loops)
        for graph in (subgraph(group, plan)[0], *(small(plan, group, b, group.computed(b))[0] for b in group.builts)):
            graph.lint()
        return 0.5 if chance.random() < 0.3 else 2.0

    for seed in range(2):
        chance.seed(seed)
        with monkeypatch.context() as patched:
            judged(patched, tmp_path / str(seed), look, kind=kind)
    assert taken == {"aten.cat.default"}


def test_what_a_loop_makes_of_random_numbers_reaches_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A loss's gradient of random scores is infinite; a kernel that reads sums of it agrees with nothing."""
    monkeypatch.setattr(benchmark, "_compile", lambda module, *_: module)
    vectors = 0

    def look(measurements: Measurements, group: Group, plan: Plan, makes: bool) -> float:
        nonlocal vectors
        if group.taken:
            (built,) = group.builts
            for node in {n for t in group.loops for n in t.all_input_nodes} - {*group.loops}:
                group.values[node] = torch.full_like(group.value(node), torch.inf)
            benchmark.Programs(Settings()).computations(plan, group, built)
            found = [group.values[c] for c in group.computed(built)]
            assert all(x.isfinite().all() for x in found) and not {*group.taken} & group.values.keys()
            vectors += len(found)
        return 2.0

    judged(monkeypatch, tmp_path, look)
    assert vectors > 2


def test_vectors_of_the_forward_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A gain's and a bias's products with a weight are made once: the backward's contests find them."""
    spared = {False: 0, True: 0}

    def look(measurements: Measurements, group: Group, plan: Plan, makes: bool) -> float:
        late = all(plan.program.in_backward(b.draft.space) for b in group.builts)
        every, mine = ([c for b in group.builts for c in of(b)] for of in (computed, group.computed))
        spared[late] += len(every) - len(mine)
        assert all(c.extent == "feature" for c in every if c not in mine)
        assert all(
            group.input(b, i, s).dim() == 1
            for b in group.builts
            for i, s in enumerate(b.inputs)
            if s in every and s not in mine
        )
        return 2.0

    judged(monkeypatch, tmp_path, look)
    assert spared[True] > 0 == spared[False]
