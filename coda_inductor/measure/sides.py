"""The same work done by several compiled programs, timed so that their times can be compared: by turns, and each alone
for seconds. On a GPU at its power limit the second is what users feel (docs/benchmarks.md)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from coda_inductor.measure import timing

Call = Callable[[], object]
WARM_S = 0.5  # of its own load, at most, before a call's time alone counts: clocks follow what runs
TURNS = 20
LEAST = 3  # calls that a time alone is the mean of


class Side(NamedTuple):
    """Of one program, in ms: the median of its turns, and of its times alone."""

    turns: float
    alone: float


def compared(calls: Sequence[Call], seconds: float, rounds: int, said: Callable[[str], None]) -> list[Side]:
    """The times of each call, which has run before. Alone each runs for `seconds`, `rounds` times, one call after the
    other and the next round in reverse. `said` is told what is being timed."""
    on_gpu = torch.cuda.is_available()
    said("timing by turns")
    turns = timing.by_turns(calls, TURNS, timing.launching(calls)) if on_gpu else on_cpu(calls)
    held: list[list[float]] = [[] for _ in calls]
    for r in range(rounds):
        order = range(len(calls))
        for i in order if r % 2 == 0 else reversed(order):
            said(f"timing each alone, round {r + 1} of {rounds}, program {i + 1} of {len(calls)}")
            held[i].append(alone(calls[i], turns[i], seconds, on_gpu))
    return [Side(ms, statistics.median(times)) for ms, times in zip(turns, held, strict=True)]


def on_cpu(calls: Sequence[Call]) -> list[float]:
    """The median ms of each call in turns."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(LEAST):
        for times, call in zip(found, calls, strict=True):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times) for times in found]


def alone(call: Call, about_ms: float, seconds: float, on_gpu: bool) -> float:
    """The mean ms of a call of `about_ms` that is repeated for `seconds`. Nothing waits for the GPU in between, so
    that a host which falls behind is counted as users would feel it."""

    def repeat(for_s: float, least: int) -> float:
        count = max(least, round(1e3 * for_s / about_ms))
        start = time.perf_counter()
        for _ in range(count):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / count

    if on_gpu:
        repeat(min(WARM_S, seconds), 1)
    return repeat(seconds, LEAST)


def peak_gib(call: Call) -> float | None:
    """The most GPU memory that a call holds over what lies there before it, in GiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
