"""How a GPU's clocks behave under load, and how well equal calls agree in the ways to time them.

    python bench/clocks.py [--out FILE]

A JSON line for each: "from rest" is the mean ms of a product beside the company of contests in bins of 50 ms, after 1.5
s of rest; "equal calls" are the times in a busy GPU (timing.compared) of six times the same product, and "unlike calls"
those of a product and of a smaller one with a pass, in either order; all begin `idle_s` after what ran before. "pause"
says how far apart a call's two times lie in each try of a burst that such a pause precedes (its first).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda_inductor.codegen import target
from coda_inductor.measure import timing

Call = Callable[[], object]
BIN_MS, LONG_MS = 50, 1500


def product(m: int, k: int, n: int) -> Call:
    """A product of random numbers in bfloat16, [m, k] @ [k, n]."""
    a, b, out = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n), (m, n)))
    return lambda: torch.mm(a, b, out=out)


def with_a_pass(call: Call, tile: Tensor) -> Call:
    """The call, then a pass over a tile."""
    out = torch.empty_like(tile)

    def run() -> None:
        call()
        torch.add(tile, 1.0, out=out)

    return run


def from_rest(call: Call, ms: float) -> list[float]:
    """The mean ms of a call of about `ms` in each bin."""
    torch.cuda.synchronize()
    time.sleep(1.5)
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    for _ in range(int(LONG_MS / ms)):
        call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    bins: dict[int, list[float]] = {}
    for start, end in itertools.pairwise(marks):
        bins.setdefault(int(marks[0].elapsed_time(end) / BIN_MS), []).append(start.elapsed_time(end))
    return [sum(found) / len(found) for found in bins.values()]


def rows() -> Iterator[dict[str, Any]]:
    """All measurements."""
    large, small = product(16384, 2048, 11008), product(16384, 2048, 8192)
    smaller = with_a_pass(small, torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16))
    company = timing.company_on(torch.cuda.current_device())

    def beside() -> None:
        large()
        for _ in range(10):
            company()

    (ms,) = timing.by_turns([beside], 11, timing.launching([beside]))
    for _ in range(3):
        yield {"what": "from rest", "ms": from_rest(beside, ms)}
    ways = {"equal calls": [large] * 6, "unlike calls": [large, smaller], "unlike calls, turned": [smaller, large]}
    for idle_s in (0.0, 0.3, 1.0):
        for what, calls in [*ways.items()] * 2:
            torch.cuda.synchronize()
            time.sleep(idle_s)
            start_s = time.perf_counter()
            found = timing.compared(calls, 15)
            seconds = time.perf_counter() - start_s
            yield {"what": what, "idle_s": idle_s, "busy_ms": [t.busy for t in found],
                   "turns_ms": [t.turns for t in found], "seconds": seconds}  # fmt: skip
    small = product(16384, 2048, 4096)
    passing = with_a_pass(small, torch.randn(16384, 5504, device="cuda", dtype=torch.bfloat16))
    yield from pauses([product(16384, 2048, 5504), passing])


def pauses(calls: list[Call]) -> Iterator[dict[str, Any]]:
    """What two calls' times are worth after pauses of some lengths before the burst."""
    usual, heard = timing.PAUSE_S, list[float]()
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: heard.append(record.args[1]) if "from itself" in record.msg else None  # type: ignore
    timing.log.addHandler(handler)
    timing.log.setLevel(logging.DEBUG)
    for timing.PAUSE_S in (0.25, 0.1, 0.05, 0.0) * 5:
        heard.clear()
        found = timing.compared(calls, 25)
        yield {"what": "pause", "pause_s": timing.PAUSE_S, "apart_percent": list(heard),
               "busy_ratio": found[1].busy / found[0].busy, "turns_ratio": found[1].turns / found[0].turns}  # fmt: skip
    timing.PAUSE_S = usual
    timing.log.removeHandler(handler)


def main() -> None:
    """Prints and keeps every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "clocks.jsonl")
    path = parser.parse_args().out
    torch.manual_seed(0)
    said = {
        "machine": torch.cuda.get_device_name(),
        "versions": target.versions() | {"python": platform.python_version()},
    }
    with path.open("a") as file:
        for row in rows():
            print(row, flush=True)
            file.write(json.dumps({**row, **said, "command": " ".join(["python", *sys.argv])}) + "\n")


if __name__ == "__main__":
    main()
