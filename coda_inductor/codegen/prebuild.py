"""Many kernels at once: worker processes compile into the store, from where a launch loads each in milliseconds.

A compile is one thread of 1-4 s, and tuning a model takes dozens. Workers are plain Python processes (no fork of a
process that holds CUDA, no guard needed in the user's script) and see no GPU. A kernel that fails here fails again,
with its reason, where it is used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.legality import Config
from coda_inductor.codegen.store import open_store
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from coda_inductor.codegen.worker import work; work()"
TARGET = ("QUACK_ARCH=90", "CUTE_DSL_ARCH=sm_90a", "CUDA_VISIBLE_DEVICES=")
MAX_WORKERS = 16
LINE = re.compile(r"^\t([\d.]+)\t(.*)$", re.MULTILINE)  # of a worker; a compiler may print, too


class Job(NamedTuple):
    """One kernel to build."""

    region: Region
    config: Config
    swapped: bool = False


class Outcome(NamedTuple):
    """What became of a job: why it failed ("": it did not), and the seconds that compiling or loading took."""

    reason: str
    seconds: float


def prebuild(jobs: Iterable[Job], cache_dir: str | None = None, *, workers: int | None = None) -> dict[Job, str]:
    """Builds the kernels in `workers` processes (None: one per core) and returns the reasons of those that failed."""
    return {job: made.reason for job, made in outcomes(jobs, cache_dir, workers=workers).items() if made.reason}


def outcomes(jobs: Iterable[Job], cache_dir: str | None = None, *, workers: int | None = None) -> dict[Job, Outcome]:
    """`prebuild`, with what became of every job."""
    directory = open_store(cache_dir)
    made: dict[Job, Outcome] = {}
    same: dict[tuple[str, Config], list[Job]] = {}  # Regions that differ in extents only share a kernel
    for job in dict.fromkeys(jobs):
        try:
            legality.require(job.region, job.config)
        except Unsupported as refusal:
            made[job] = Outcome(str(refusal), 0.0)
        else:
            text = source.render(job.region, swapped=job.swapped)
            same.setdefault((source.module_name(text), job.config), []).append(job)
    todo = [alike[0] for alike in same.values()]
    count = min(workers or len(os.sched_getaffinity(0)), MAX_WORKERS, len(todo))
    shares = [todo[i::count] for i in range(count)]
    first: dict[Job, Outcome] = {}
    for share, process in [(share, _start(share, str(directory))) for share in shares]:
        first |= dict(zip(share, _outcomes(process, len(share)), strict=True))
    return made | {job: first[alike[0]] for alike in same.values() for job in alike}


def _start(share: list[Job], directory: str) -> subprocess.Popen[str]:
    """A worker at work on `share`."""
    command = ["env", *TARGET, sys.executable, "-c", BOOT, json.dumps(sys.path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps([[directory, job.region.text, list(job.config), job.swapped] for job in share]))
    process.stdin.close()
    process.stdin = None  # or communicate() would flush it
    return process


def _outcomes(process: subprocess.Popen[str], count: int) -> list[Outcome]:
    """What became of a worker's `count` kernels."""
    out, err = process.communicate()
    found = [Outcome(reason, float(seconds)) for seconds, reason in LINE.findall(out)]
    return found + [Outcome(f"the compiling process ended early: {err.strip()[-500:]}", 0.0)] * (count - len(found))
