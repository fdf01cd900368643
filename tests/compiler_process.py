"""Jobs for the process that compiles kernels, and what can be done to it and to its workers meanwhile."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Region
from coda_inductor.kernels import prebuild as prebuild_module
from coda_inductor.kernels.prebuild import Job, prebuild

MISSING = [name for name in ("cutlass", "quack", "triton") if importlib.util.find_spec(name) is None]


def amid(job: Job, store: str, act: Callable[[int, int], object]) -> dict[Job, str]:
    """prebuild([job]), during which `act` is called with the process ids of the compiling process and of its worker."""
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(prebuild, [job], store, workers=1)
        before, workers = set[int](), set[int]()
        while not workers and not failed.done():
            server = prebuild_module._running[0].process.pid if prebuild_module._running else 0
            now = forks(server) if server else set()
            workers, before = now & before, now
            time.sleep(0.01)
        act(server, workers.pop())
        return failed.result()


def forks(process: int) -> set[int]:
    """The children that run the same program: what the compiler imports runs others, for a moment."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        program, *others = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (process, *children))
    except OSError:  # one has ended
        return set()
    return {int(pid) for pid, other in zip(children, others, strict=True) if other == program}


def kernels_of(*regions: Region) -> list[Job]:
    return [Job(region, Config(128, 128, 2, 1, True)) for region in regions]
