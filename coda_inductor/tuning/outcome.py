"""What tuning measured, and what wins it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported, forget_frames
from coda_inductor.measure.free_memory import HINT
from coda_inductor.measure.timing import LONG_MS, Times
from coda_inductor.patterns import graph as g

log = logging.getLogger("coda_inductor.tuning")

WIN = 1.02  # Inductor's time over ours interleaved, at least
# Of long calls, under a load that lasts: such a ratio is off by 0.3 to 0.7 % in one pass (timing.py), and by 1.2 % from
# compile to compile, as GPUs and tiles differ (94 ratios of 28 groups, bench/results/training.jsonl since 5ebe41e).
# Where one lay between 1.005 and 1.01, the others of the same groups had means of 1.004, 1.023 and 1.035; where between
# 1 and 1.005, of 0.998, 1.002 and 1.018.
LONG_WIN = 1.005
COSTS = 0.01  # of Inductor's time under load, at most: six equal calls lay 0.2 to 1.3 % apart (bench/clocks.py)
# Of 186 groups that won so interleaved none lost under load: Inductor took at least 1.028 times as long there, too
# (H200; the groups of bench/results with times of both kinds, 409 in all).
SURE = 1.15
# How narrowly a law wins matters, up to 1.15 (tuner.py). Of 67 groups that won so interleaved Inductor took at least
# 1.147 times as long under load, too (of 798 in bench/results at 92634f0).
SURE_OF_LAWS = 1.3
# What a burst says of a busy GPU is off by up to 4 %, and the mean by half of it: a group of four Regions took 1.228 ms
# in one and 1.281 in the next, where the program without its law took 1.231 (H200, the forward of rotary-2048 in
# bench/results at 92634f0). So one that would undo a law narrowly is asked again.
NEAR, BURSTS = 1.03, 3
CLOSE = 1.15  # below, a law that wins is compared with the program without it
TURNS, BUSY = ("ms", "baseline_ms"), ("busy_ms", "busy_baseline_ms")  # of a record: ours and the other side's
TIMED = ("ms", "busy_ms", "baseline_ms", "busy_baseline_ms")  # our Times and the other side's
FREE, SLOW = Times(0.0, 0.0), Times(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group's products, as a bit set, and the times of both sides: none if it was not measured."""

    mask: int
    fused: Times = FREE
    baseline: Times = SLOW
    stands: bool = False
    """Is it known from a hint that a law is worth it?"""
    said: bool | None = None
    """What a hint says, if that decides: does the group win? Then the times of the other side are the hint's."""

    @property
    def loses(self) -> str:
        """Why the group is not kept; empty if it wins: interleaved, and under load it may cost hardly more."""
        if self.said is not None:
            ours = self.fused.turns / self.baseline.turns
            return "" if self.said else f"measured slower on another such card: {ours:.2f} of Inductor's time"
        fused, baseline, where = self.fused.turns, self.baseline.turns, ""
        if wins((fused, baseline)):
            fused, baseline, where = self.fused.busy, self.baseline.busy, " in a busy GPU"
            if fused - baseline <= COSTS * abs(baseline):
                return ""
        slower = "slower" if fused >= baseline else "hardly faster"  # by less than tuning asks for
        return f"measured {slower}{where}: {fused * 1e3:.0f} us fused, {baseline * 1e3:.0f} us by Inductor"

    @property
    def ratio(self) -> float:
        """Inductor's time over ours, the lesser of both."""
        pairs = zip(self.baseline, self.fused, strict=True)
        return min(baseline / fused if fused > 0 else math.inf for baseline, fused in pairs)

    def costs(self, margin: float) -> bool:
        """Does the group take more than the other side, by more than that part of its time?"""
        return self.fused.mean - self.baseline.mean > margin * self.baseline.mean


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """Of groups that run one after the other."""
    mask, fused, baseline = 0, FREE, FREE
    for o in outcomes:
        mask |= o.mask
        fused = Times(fused.turns + o.fused.turns, fused.busy + o.fused.busy)
        baseline = Times(baseline.turns + o.baseline.turns, baseline.busy + o.baseline.busy)
    return Outcome(mask, fused, baseline)


def borne(outcomes: Mapping[int, Outcome], losers: Iterable[int], readers: Sequence[AbstractSet[int]]) -> set[int]:
    """The losers that are kept all the same, because groups that read their sums win more than they lose: without
    these sums the readers would be others, or none. No gain bears two losses."""
    found, shared = set[int](), {i: frozenset({i}) for i, o in outcomes.items() if not o.loses}
    for i in sorted(losers, reverse=True):  # who reads a reader's sums comes after it, as a rule
        party = frozenset({i}).union(*(shared[j] for j in readers[i] if j in shared))
        if len(party) > 1 and not together(outcomes[j] for j in party).loses:
            found.add(i)
            shared |= dict.fromkeys(party, party)
    return found


def wins(turns: Sequence[float]) -> bool:
    """Is our time interleaved, the first of the two, enough less than Inductor's?"""
    fused, baseline = turns
    return baseline >= (LONG_WIN if fused >= LONG_MS else WIN) * fused


def sure(turns: Sequence[float], *, lawless: bool = True) -> bool:
    """Is it so much less that a busy GPU need not be asked?"""
    fused, baseline = turns
    return baseline >= (SURE if lawless else SURE_OF_LAWS) * fused


def in_bursts(burst: Callable[[], Sequence[Times]], margin: float) -> Sequence[Times]:
    """Both sides' times in a burst; if ours cost narrowly more than the margin, those of the median ratio of several.
    (What was timed interleaved alone, or under a load that lasts, would hardly change.)"""

    def ratio(times: Sequence[Times]) -> float:
        return times[0].mean / times[1].mean

    found = [burst()]
    if 1 + margin < ratio(found[0]) < NEAR and any(t.turns != t.busy for t in found[0]):
        found += [burst() for _ in range(BURSTS - 1)]
    return sorted(found, key=ratio)[len(found) // 2]


def timed(found: dict[str, Any]) -> bool:
    """Is this the record of a measurement? Only one that turns decided may have no times under load."""
    if not by_turns(found):
        return False
    if hinted(found):
        return True
    turns = [found[name] for name in TURNS]
    decided = not found.keys() & set(BUSY) and (not wins(turns) or sure(turns))
    return decided or fully_timed(found)


def by_turns(found: dict[str, Any]) -> bool:
    """Has the record at least both sides' times interleaved?"""
    return "regions" in found and all(isinstance(found.get(name), float) for name in TURNS)


def hinted(found: dict[str, Any]) -> bool:
    """Is it a record for which a hint spared something (shipped.py)?"""
    return found.get("hinted") is True


def compared_with(found: dict[str, Any]) -> bool:
    """Is this the record of a group and the program without its law? That takes all times, or a hint."""
    return by_turns(found) and (hinted(found) or fully_timed(found))


def fully_timed(found: dict[str, Any]) -> bool:
    """Has the record all times of both sides?"""
    return all(isinstance(found.get(name), float) for name in TIMED)


def recorded(regions: Sequence[str], times: Sequence[Times]) -> dict[str, Any]:
    """The record of a measurement: the digests of our Regions, and both sides' times as far as they were taken."""
    ours, theirs = times
    found = {name: ms for name, ms in zip(TIMED, (*ours, *theirs), strict=True) if math.isfinite(ms)}
    return {"regions": list(regions), **found}


def outcome_of(mask: int, found: dict[str, Any]) -> Outcome:
    """What a record says of the products of a mask. Where turns decided they count for both."""
    ms, baseline_ms = (found[name] for name in TURNS)
    busy_ms, busy_baseline_ms = (found.get(name, turns) for name, turns in zip(BUSY, (ms, baseline_ms), strict=True))
    stands, said = (found.get(name) if hinted(found) else None for name in ("stands", "wins"))
    told = said if isinstance(said, bool) else None
    return Outcome(mask, Times(ms, busy_ms), Times(baseline_ms, busy_baseline_ms), stands is True, told)


# ---- what keeps a group from being measured, beside which the others are measured all the same


def unmeasured(error: Exception, product: fx.Node) -> Unsupported:
    """Why a group could not be measured, at which line of the user's, and what to do."""
    if isinstance(error, Unsupported):
        return Unsupported(error.what, where=error.where or g.source_line(product), hint=error.hint)
    return Unsupported("out of memory while it was measured", where=g.source_line(product), hint=HINT)


@contextlib.contextmanager
def passing_over() -> Iterator[None]:
    """Goes on where one group fails in a way that is foreseen."""
    try:
        yield
    except Exception as error:
        if not foreseen(error):
            raise
        log.info("not measured: %s", error)
        forget_frames(error)


def foreseen(error: Exception) -> bool:
    """May a group fail so, and the others be measured all the same?"""
    return isinstance(error, Unsupported) or out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    """Torch has a class for it, which Inductor wraps; the driver and cuBLAS say it in words."""
    full = isinstance(error, RuntimeError) and any(said in str(error) for said in ("out of memory", "ALLOC_FAILED"))
    return full or isinstance(error, torch.OutOfMemoryError)
