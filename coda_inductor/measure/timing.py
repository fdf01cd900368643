"""How long calls take on the current stream, compared fairly: interleaved, and beside other work in a GPU that is as
busy as a step of training keeps it; long calls under a load of their own that lasts."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

log = logging.getLogger("coda_inductor.timing")

Call = Callable[[], object]
Decided = Callable[[Sequence[float]], bool]
"""Given the ms of the calls interleaved: True if they are all that is asked for. (The rest takes 1 s or more.)"""

CYCLES = 2_000_000_000  # of the GPU in a second, at most (1.98 GHz, H200)
MAX_AHEAD = 0.02  # seconds that the GPU idles before a rotation; a host that is slower than that is timed
# From rest an H200 needs 0.2 s of one load to hold its clocks, to 1 %, until 0.8 s; then it is up to 19 % slower for
# some 0.2 s, and recovers (bench/clocks.py). So a burst is over before. Where much ran before it, it may not hold them,
# and is repeated after a longer rest. Each call runs twice in it, in one order and in its reverse: two unlike calls
# then compared as 1.13 to 1.19x, whichever came first, and six equal ones lay 0.2 to 2.8 % apart (in the same order
# twice the last took 2.1 to 3.0 % more than the first; with 0.1 s to rise, up to 6.3 %).
RISING_MS, BURST_MS = 200, 700
# Before a burst; before another try. After 0.1 s a call's two times lay 0.7 to 1.3 % apart in five bursts, after
# 0.25 s 0.6 to 1.2 %; after 0.05 s 2 to 10 %, after none 10 to 24 % (H200, bench/results/clocks.jsonl, "pause").
PAUSE_S, REST_S = 0.1, 0.5
SETTLING = 0.6  # of a call's share of a burst: the clocks follow what runs; the rest counts
LEVEL, TRIES = 0.03, 3  # how far a call's times may lie apart
KEEPS_AHEAD = 0.8  # of the time on the GPU, at most, for the host to launch it, or its own time would be counted
# Of longer calls too few fit into a burst, and interleaved they have their neighbours' clocks: in a layer of width 8192
# (calls of 3 to 20 ms, H200) a call's two times in a burst lay up to 14 % apart. Under a load that lasts longer than
# the fall above they settle, but slowly: of 8 to 20 ratios of a Region of that layer and Inductor's program, each of a
# share of 400 ms for either, of which the last quarter counts, the standard deviation was 0.3 to 0.7 % (three Regions);
# of 400 ms and their last half 0.4 to 2.1 %, of 200 ms and their last two fifths 2.6 to 3.0 % (one).
LONG_MS, LONG_SLACK = 8, 1.25
STEADY_MS, LONG_SHARE_MS, PASSES = 1200, 400, 3  # until then; a call's share from there; there and back, for ratios
LONG_SETTLING = 0.75
CLEAR = 1.05  # calls that lie so far apart need no further pass: 1.005 decides, more than five deviations off
MOST_COMPANY = 3  # times as long as the fastest call, or its own time: if a slow host needs it; more would drown calls
# m, k, n: two waves of 132 blocks of 128 x 256. One takes an H200 0.05 ms, which a host may need to launch it: then
# calls were only interleaved. Its 66 MB fill the L2 cache, as the rest of a step does.
PRODUCT = (3072, 4096, 2816)


class Times(NamedTuple):
    """Of one call, in ms: the median of its turns, and what it adds to a busy GPU. Of a long call both are its time
    under a load that lasts."""

    turns: float
    busy: float

    @property
    def mean(self) -> float:
        """A GPU is somewhere between the two."""
        return (self.turns + self.busy) / 2


def compared(
    calls: Sequence[Call],
    rounds: int,
    *,
    slack: float = math.inf,
    level: float = LEVEL,
    ratios: bool = True,
    decided: Decided = lambda turns: False,
) -> list[Times]:
    """The times of each call. A busy GPU runs other work beside it, as long again or, if the host would else fall
    behind, longer: products that draw all the power that it may have. Those that interleaved take more than `slack`
    times as long as the fastest are not timed so (infinite), and none if the turns have `decided`. Where the host
    cannot keep ahead of the GPU, turns count for both. Without `ratios` the order is all that is asked for: the other
    work's own time, which is taken from all alike, may then be off.

    At its power limit a GPU lowers its clocks for all that it runs, within some 50 ms (bench/sustained.py): what draws
    more power slows the rest of a step down, which neither a rotation of milliseconds nor a call repeated alone
    shows. Where every call takes LONG_MS, each is its own company (`lasting`)."""
    if not calls:
        return []
    launching_s = launching(calls)
    turns = by_turns(calls, 3, launching_s)
    if all(max(LONG_MS, 1e3 * host_s / KEEPS_AHEAD) <= ms for ms, host_s in zip(turns, launching_s, strict=True)):
        return lasting(calls, turns, slack, ratios, decided)
    turns = by_turns(calls, rounds, launching_s)
    if decided(turns):
        return [Times(ms, math.inf) for ms in turns]
    company = company_on(torch.cuda.current_device())
    company_s = launching([company])
    (one_ms,) = by_turns([company], rounds, company_s)
    close = [i for i, ms in enumerate(turns) if ms <= slack * min(turns)]
    hosts = [(1e3 * launching_s[i], turns[i]) for i in close]
    repeats = company_for(hosts, 1e3 * company_s[0], one_ms)
    if repeats is None:
        said = ", ".join(f"{host:.3f} for {ms:.3f}" for host, ms in (*hosts, (1e3 * company_s[0], one_ms)))
        log.info("timed interleaved only: ms to launch for ms on the GPU, the company last: %s", said)
        return [Times(ms, ms) for ms in turns]

    def beside(call: Call) -> Call:
        def run() -> None:
            call()
            for _ in range(repeats):
                company()

        return run

    pairs = [*(beside(calls[i]) for i in close), beside(lambda: None)]
    about = [*(turns[i] + repeats * one_ms for i in close), repeats * one_ms]
    *found, alone_ms = repeated(pairs, about, level, last=ratios)
    busy = [math.inf] * len(calls)
    for i, ms in zip(close, found, strict=True):
        busy[i] = ms - alone_ms
    return list(map(Times, turns, busy))


def lasting(calls: Sequence[Call], turns: Sequence[float], slack: float, ratios: bool, decided: Decided) -> list[Times]:
    """`compared` for long calls: under a load that lasts. Their turns, which are rough, decide only between calls that
    are LONG_SLACK apart, and so does `slack`."""
    near = [ms <= LONG_SLACK * min(turns) for ms in turns]
    if sum(near) == 1 and decided(turns):
        return [Times(ms, math.inf) for ms in turns]
    timed = [i for i, close in enumerate(near) if close or math.isinf(slack)]
    times = [Times(ms, math.inf) for ms in turns]
    found = steady([calls[i] for i in timed], [turns[i] for i in timed], PASSES if ratios else 1)
    for i, ms in zip(timed, found, strict=True):
        times[i] = Times(ms, ms)
    return times


def company_for(calls: Sequence[tuple[float, float]], launching_ms: float, one_ms: float) -> int | None:
    """How often the company, which takes `launching_ms` of the host for `one_ms` of the GPU, runs beside each of the
    calls (the same two of each): as long as the fastest, or longer until the host keeps ahead of all. None if that
    would be too long."""
    fastest = max(one_ms, min(ms for _, ms in calls))
    behind = max(host - KEEPS_AHEAD * ms for host, ms in calls)
    gained = KEEPS_AHEAD * one_ms - launching_ms  # by each
    if gained <= 0:
        return None
    repeats = max(round(fastest / one_ms), math.ceil(behind / gained))
    return repeats if repeats * one_ms <= MOST_COMPANY * fastest else None


def company_on(device: int) -> Call:
    """A product of random numbers."""
    m, k, n = PRODUCT
    random = torch.Generator(f"cuda:{device}")  # the user's is left alone
    with torch.inference_mode(False):
        a, b, out = (torch.empty(s, device=random.device, dtype=torch.bfloat16) for s in ((m, k), (k, n), (m, n)))
        a.normal_(generator=random)
        b.normal_(generator=random)
    return lambda: torch.mm(a, b, out=out)


def repeated(calls: Sequence[Call], about: Sequence[float], level: float = LEVEL, *, last: bool = True) -> list[float]:
    """The ms of each call, in one burst of load: each is repeated alone, one call after the other, and all once more in
    reverse, so that clocks that sink evenly hit all alike. `about` says how long they take, roughly. If a call's two
    times differ by more than `level`, the clocks did not hold, and the burst is tried again, unless calls are too long
    for one; the one that held best counts. The last call's two follow each other, where one fall could hit both: the
    end of the rise, which runs it too, must agree with them, unless the `last` may be off."""
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    share_ms = (BURST_MS - RISING_MS) / len(order)
    rest_ms = SETTLING * share_ms
    tries = TRIES if max(about) <= share_ms else 1
    best, drift = list[float](), math.inf
    for tried in range(tries):
        time.sleep(REST_S if tried else PAUSE_S)
        risen = block(calls[-1], RISING_MS - share_ms + rest_ms, share_ms - rest_ms, about[-1])
        marks = [block(calls[i], rest_ms, share_ms - rest_ms, about[i]) for i in order]
        torch.cuda.synchronize()
        before, *found = (start.elapsed_time(end) / count for start, end, count in (risen, *marks))
        pairs = [*zip(found[: len(calls)], reversed(found[len(calls) :]), strict=True)]
        ends = (*pairs[-1], before) if last else pairs[-1]
        off = max(max(times) / min(times) - 1 for times in (*pairs[:-1], ends))
        if off < drift:
            best, drift = [sum(pair) / 2 for pair in pairs], off
        log.debug("of %d calls one differs by %.1f %% from itself", len(calls), 100 * off)
        if drift <= level:
            return best
    log.info("the clocks did not hold: a call's times differ by %.1f %%, %d tried", 100 * drift, tries)
    return best


def steady(calls: Sequence[Call], about: Sequence[float], passes: int) -> list[float]:
    """The ms of each call under a load that lasts: each is repeated alone, one call after the other and back again. Of
    several passes the median counts; once calls lie CLEAR apart none follows. `about` says how long they take,
    roughly."""
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    rest_ms = LONG_SETTLING * LONG_SHARE_MS
    run_for(calls[-1], STEADY_MS, about[-1], least=math.ceil(STEADY_MS / about[-1]))
    both: list[list[float]] = [[] for _ in calls]  # the means of there and back
    for _ in range(passes):
        marks = [block(calls[i], rest_ms, LONG_SHARE_MS - rest_ms, about[i], least=1) for i in order]
        torch.cuda.synchronize()
        found = [start.elapsed_time(end) / count for start, end, count in marks]
        for ms, there, back in zip(both, found[: len(calls)], reversed(found[len(calls) :]), strict=True):
            ms.append((there + back) / 2)
        if apart(both):
            break
    off = max(max(t) / min(t) - 1 for t in both)
    if off > LEVEL:
        log.info("the load did not hold: in %d passes a call's times differ by %.1f %%", len(both[0]), 100 * off)
    return [statistics.median(t) for t in both]


def apart(times: Sequence[Sequence[float]]) -> bool:
    """Are all times of each call CLEAR of all of every other's?"""
    ordered = sorted(map(sorted, times))
    return len(times) > 1 and all(low[-1] * CLEAR <= high[0] for low, high in itertools.pairwise(ordered))


def block(
    call: Call, before_ms: float, share_ms: float, ms: float, least: int = 0
) -> tuple[torch.cuda.Event, torch.cuda.Event, int]:
    """Runs a call of about `ms` for `before_ms`, at `least` so often, then for its share. The events around that, and
    how many calls are between."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run_for(call, before_ms, ms, least)
    start.record()
    count = run_for(call, share_ms, ms, least=1)
    end.record()
    return start, end, count


def run_for(call: Call, for_ms: float, ms: float, least: int = 0) -> int:
    """Launches a call of about `ms` as often as fits into `for_ms`; how often."""
    count = max(least, int(for_ms / ms + 1e-6))
    for _ in range(count):
        call()
    return count


def launching(calls: Sequence[Call]) -> list[float]:
    """The seconds that the host takes to launch each call, the least of three. Each has then run before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    least = [float("inf")] * len(calls)
    for _ in range(3):
        for i, call in enumerate(calls):
            start_s = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - start_s)
    return least


def by_turns(calls: Sequence[Call], rounds: int, launching_s: Sequence[float]) -> list[float]:
    """The median ms of each call in rotation, so that clock changes hit all alike.

    The GPU first idles for longer than the host takes to launch a rotation: else that would be timed. (One side of a
    measurement of ViT-L took the host 60-640 us, beside an H200.)"""
    ahead = int(CYCLES * min(2 * sum(launching_s), MAX_AHEAD)) + 50_000 * len(calls)
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for r in range(rounds):
        torch.cuda._sleep(ahead)
        for i in ((r + j) % len(calls) for j in range(len(calls))):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[i]()
            end.record()
            marks[i].append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in mark) for mark in marks]
