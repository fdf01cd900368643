"""Tuning: before a Region enters a graph, it is timed against the operations that it replaces.

Regions that a law ties together (one reads another's sum, or a store that no node of the graph equals) stand or fall
as a group. The group runs as generated kernels, and the same nodes of the user's graph as Inductor compiles them, on
real tensors of the graph's sizes: interleaved and, unless turns decide, in a GPU under load; long ones
under a load of their own that lasts. What does not win by 2 % (of long calls by 0.5 %), or costs more than 1 % in a
busy GPU, is derived again without the law, and if that loses too it is left to Inductor, unless groups that read its
sums win more than it loses; a law that wins narrowly must also cost at most 1 % more than the program derived without
it, and nothing more if it leaves work to the backward. The other side is always Inductor's default mode. (What is
measured, and kept on disk: measurements.py. What hints spare of it: shipped.py.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.core.errors import forget_frames
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import prebuild, store
from coda_inductor.passes.switches import laws_of
from coda_inductor.plan import search
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.group import groups, mask, readers, tied
from coda_inductor.tuning.measurements import Measurements, deferred
from coda_inductor.tuning.outcome import CLOSE, Outcome, borne, foreseen, outcome_of, passing_over, unmeasured

log = logging.getLogger("coda_inductor.tuning")


class Tuner:
    """Decides for one graph; called again whenever the derivation has changed, until nothing loses."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        failed: Callable[[Exception], None],
        row: Target = SM_90A,
    ) -> None:
        self.settings, self.failed = settings, failed
        self.measurements = Measurements(settings, device, row)
        self._compared, self._foreseen = 0, False
        self._derived: list[int] | None = None  # the products of each Region of the backward, as it was first derived
        self._covered = 0  # the products in Regions now

    def __call__(self, plan: Plan, builts: list[Built]) -> Limits:
        """The verdict on all Regions of a plan. What was measured for an earlier one comes first: its verdict may spare
        the measurement of what was derived beside it. What is found on disk does not, or a second process would go
        another way."""
        if self._derived is None:
            self._derived = [b.mask for b in builts if plan.program.in_backward(b.draft.space)]
        self._covered = mask(builts)
        every = groups(plan, builts)
        unknown = tied(
            readers(every), {i for i, members in enumerate(every) if not self.measurements.known(plan, members)}
        )
        known = [members for i, members in enumerate(every) if i not in unknown]
        fresh = sorted((every[i] for i in sorted(unknown)), key=lambda members: bool(deferred(plan, members)))
        if known:
            self.measurements.begin(plan, fresh, idle=True)
        verdict = self.verdict_on(plan, known)
        if not verdict:
            self.measurements.prepare(plan, fresh)
            verdict = self.verdict_on(plan, fresh)
        if not verdict:
            self.measurements.ahead.end()
            self.measurements.ahead.begin(self.measurements.turned(plan, builts), idle=True)
        return verdict

    @property
    def backward(self) -> tuple[int, int]:
        """Of how many of the backward's Regions, as they were first derived, all products are in Regions still, and how
        many there were."""
        derived = self._derived or []
        return sum(not m & ~self._covered for m in derived), len(derived)

    def verdict_on(self, plan: Plan, candidates: list[list[Built]]) -> Limits:
        """The verdict on some groups of a plan."""
        failed, outcomes = dict[int, str](), dict[int, Outcome]()
        for i, members in enumerate(candidates):
            if deferred(plan, members) and not self._foreseen and not self.measurements.stands(plan, members):
                self._foreseen = True
                with passing_over():
                    self.foresee(plan, failed | lost(o for o in outcomes.values() if o.loses))
            try:
                outcomes[i] = self.measurements.outcome(plan, members)
            except Exception as error:  # a kernel that cannot be built or is wrong, or no memory to try it in
                if not foreseen(error):
                    raise
                why = self.left(plan.program.product(members[0].draft.space.accs[0]).node, error)
                failed |= {acc.bit: why for b in members for acc in b.products}
        return self.decide(plan, candidates, outcomes, failed)

    def loses(self, node: fx.Node, name: str, row: Callable[[], dict[str, Any]]) -> str:
        """Why something that stands for a node, called `name`, is left to Inductor: by its row, or because it cannot
        be measured; "" if it wins. The row is reported with those of the Regions, unless it is empty: nothing is to be
        measured then."""
        try:
            found = row()
        except Exception as error:  # as in verdict_on
            if not foreseen(error):
                raise
            return self.left(node, error)
        if not found:
            return ""
        log.info("%s: %s", name, ", ".join(f"{k} {v:.4f}" for k, v in found.items() if k.endswith("ms")))
        self.measurements.rows.append(found)
        return outcome_of(1, found).loses

    def left(self, node: fx.Node, error: Exception) -> str:
        """Says that a node is left to Inductor because it cannot be measured, and returns why."""
        failure = unmeasured(error, node)
        self.failed(failure)
        forget_frames(error)
        return failure.what

    def decide(
        self, plan: Plan, candidates: list[list[Built]], outcomes: dict[int, Outcome], failed: dict[int, str]
    ) -> Limits:
        """What follows from the outcomes of the candidates."""
        lawless = [i for i, o in outcomes.items() if o.loses and not deferred(plan, candidates[i])]
        kept = borne(outcomes, lawless, readers(candidates))
        for i in kept:
            log.info("%s are kept for who reads their sums", "+".join(b.region.digest for b in candidates[i]))
        undeferred, close = 0, dict[int, list[Built]]()
        for i, outcome in outcomes.items():
            late = deferred(plan, candidates[i])
            if outcome.loses:
                undeferred |= late
            elif late & ~self._compared and outcome.ratio < CLOSE and not outcome.stands:
                close[late] = candidates[i]
        banned = failed | lost(outcomes[i] for i in lawless if i not in kept)
        if close and not banned and not undeferred:
            undeferred = self.better_undeferred(plan, close)
        return Limits(banned, undeferred)

    def foresee(self, plan: Plan, banned: dict[int, str]) -> None:
        """Begins to compile the program that no law defers, for narrow winners to be compared with: what loses without
        a law is `banned` by now (also what its readers will keep), and while laws are measured the cores have nothing
        else to do."""
        if self.measurements.ahead.made:
            other = self.replanned(plan, banned, sum(1 << bit for bit in {f.product for f in plan.firings} - {-1}))
            every = groups(other, other.builts)
            log.info("%d kernels to compile meanwhile", self.measurements.begin(other, every, idle=True))

    def replanned(self, plan: Plan, banned: dict[int, str], undeferred: int) -> Plan:
        """The plan with more products banned, and more (a bit set) undeferred."""
        program = plan.program
        limits = replace(program.limits, never=frozenset(), crowded=0) | Limits(banned, undeferred)
        return search.plan(program.lifted, laws_of(self.settings), limits)

    def better_undeferred(self, plan: Plan, close: dict[int, list[Built]]) -> int:
        """The deferred products (a bit set) of narrow winners that take less as the user wrote their operands: a norm
        in the L2 cache costs less than the sums and the longer epilogue that would replace it."""
        bits = functools.reduce(int.__or__, close)
        self._compared |= bits
        other = self.replanned(plan, {}, bits)
        covered = functools.reduce(int.__or__, (mask(members) for members in close.values()))
        alike, rest = list[list[Built]](), list[list[Built]]()
        for members in groups(other, other.builts):
            (alike if mask(members) & covered else rest).append(members)
        self.measurements.prepare(other, alike, rest)
        kept, found = list[list[Built]](), 0
        for members in alike:
            with passing_over():  # without this group, then
                kept += [] if self.measurements.outcome(other, members).loses else [members]
        for late, members in close.items():
            parts = [b for m in kept if mask(m) & ~mask(members) == 0 for b in m]
            parts.sort(key=lambda b: b.draft.space.accs[-1].bit)  # as they run
            with passing_over():
                if parts and self.measurements.against(plan, members, other, parts).costs(
                    self.measurements.margin(plan, members)
                ):
                    found |= late
        return found


def lost(outcomes: Iterable[Outcome]) -> dict[int, str]:
    """The products of losers, by bit, with the reason."""
    return {bit: o.loses for o in outcomes for bit in range(o.mask.bit_length()) if o.mask >> bit & 1}


def warm_up_early(settings: Settings, inputs: Sequence[Any]) -> None:
    """Where nothing was measured yet, what compiles kernels starts now, while the graph is still traced; but not for a
    graph that has no weights."""
    weights = any(isinstance(x, torch.Tensor) and x.dim() == 2 and x.is_floating_point() for x in inputs)
    if not settings.measures or settings.target == "reference" or not weights:
        return
    if not any((store.open_store(settings.cache_dir) / "tuning").glob("*.json")):
        prebuild.warm_up(SM_90A.name if settings.target == "auto" else settings.target)
