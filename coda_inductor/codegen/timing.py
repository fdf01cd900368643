"""How long calls take on the current stream, compared fairly: by turns, and beside other work in a GPU that is as busy
as a step of training keeps it."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

log = logging.getLogger("coda_inductor.timing")

Call = Callable[[], object]

CYCLES = 2_000_000_000  # of the GPU in a second, at most (1.98 GHz, H200)
MAX_AHEAD = 0.02  # seconds that the GPU idles before a rotation; a host that is slower than that is timed
SETTLING_MS, COUNTED_MS = 20, 40  # of a block: the GPU's clocks follow what runs, most of the way; then it counts
KEEPS_AHEAD = 0.8  # of the time on the GPU, at most, for the host to launch it, or its own time would be counted
MOST_COMPANY = 3  # times as long as the fastest call, or its own time: if a slow host needs it; more would drown calls
# m, k, n: one wave of 132 blocks of 128 x 256. With a k of 2048 a host beside an H200 took too long to launch it, and
# most contests of Llama-1B fell back to turns. Its 44 MB fill most of the L2 cache, as the rest of a step does.
PRODUCT = (1536, 4096, 2816)


class Times(NamedTuple):
    """Of one call, in ms: the median of its turns, and what it adds to a busy GPU."""

    turns: float
    busy: float

    @property
    def mean(self) -> float:
        """A GPU is somewhere between the two."""
        return (self.turns + self.busy) / 2


def compared(calls: Sequence[Call], rounds: int, *, passes: int = 2, slack: float = math.inf) -> list[Times]:
    """The times of each call. A busy GPU runs other work beside it, as long again or, if the host would else fall
    behind, longer: products that draw all the power that it may have. `passes` are there and back through all calls;
    those that by turns take more than `slack` times as long as the fastest are not timed so (infinite). Where the host
    cannot keep ahead of the GPU, turns count for both.

    At its power limit a GPU lowers its clocks for all that it runs, most of it within 50 ms (bench/sustained.py): what
    draws more power slows the rest of a step down, which neither a rotation of milliseconds nor a call repeated alone
    shows."""
    if not calls:
        return []
    launching_s = launching(calls)
    turns = by_turns(calls, rounds, launching_s)
    company = company_on(torch.cuda.current_device())
    company_s = launching([company])
    (one_ms,) = by_turns([company], rounds, company_s)
    close = [i for i, ms in enumerate(turns) if ms <= slack * min(turns)]
    hosts = [(1e3 * launching_s[i], turns[i]) for i in close]
    repeats = company_for(hosts, 1e3 * company_s[0], one_ms)
    if repeats is None:
        said = ", ".join(f"{host:.3f} for {ms:.3f}" for host, ms in (*hosts, (1e3 * company_s[0], one_ms)))
        log.info("timed by turns alone: ms to launch for ms on the GPU, the company last: %s", said)
        return [Times(ms, ms) for ms in turns]

    def beside(call: Call) -> Call:
        def run() -> None:
            call()
            for _ in range(repeats):
                company()

        return run

    pairs = [*(beside(calls[i]) for i in close), beside(lambda: None)]
    about = [*(turns[i] + repeats * one_ms for i in close), repeats * one_ms]
    *found, alone_ms = repeated(pairs, about, passes)
    busy = [math.inf] * len(calls)
    for i, ms in zip(close, found, strict=True):
        busy[i] = ms - alone_ms
    return list(map(Times, turns, busy))


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


def repeated(calls: Sequence[Call], about: Sequence[float], passes: int) -> list[float]:
    """The ms of each call in blocks of nothing else (60 ms, of which 40 count), there and back through all calls.
    `about` says how long they take, roughly."""
    there = list(range(len(calls)))
    totals = [0.0] * len(calls)
    block(calls[0], about[0])  # from rest
    marks = [(i, block(calls[i], about[i])) for i in (there + there[::-1]) * passes]
    torch.cuda.synchronize()
    for i, (start, end, count) in marks:
        totals[i] += start.elapsed_time(end) / count
    return [total / (2 * passes) for total in totals]


def block(call: Call, ms: float) -> tuple[torch.cuda.Event, torch.cuda.Event, int]:
    """Launches a call of about `ms` for a while. The events around what counts, and how many calls are between."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    counts = [max(1, round(for_ms / ms)) for for_ms in (SETTLING_MS, COUNTED_MS)]
    for event, count in zip((start, end), counts, strict=True):
        for _ in range(count):
            call()
        event.record()
    return start, end, counts[1]


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
    contest of ViT-L took the host 60-640 us, beside an H200.)"""
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
