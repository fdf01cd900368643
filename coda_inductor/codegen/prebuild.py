"""Many kernels at once: worker processes compile into the store, from where a launch loads each in milliseconds.

A compile is one thread of 1-4 s, and tuning a model takes dozens. One plain Python process, started ahead of the first
request, imports the compiler and forks the workers (no fork of a process that holds CUDA, no guard needed in the user's
script); it sees no GPU. A kernel that fails here fails again, with its reason, where it is used.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from typing import NamedTuple

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.legality import Config
from coda_inductor.codegen.store import open_store
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from coda_inductor.codegen import worker; worker.serve()"
)
TARGET = ("QUACK_ARCH=90", "CUTE_DSL_ARCH=sm_90a", "CUDA_VISIBLE_DEVICES=")
MAX_WORKERS = 16


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
    first = dict(zip(todo, _asked(todo, str(directory), workers), strict=True))
    return made | {job: first[alike[0]] for alike in same.values() for job in alike}


class Compiler:
    """The process that imports the compiler. A request is a line, and so is the answer to each of its jobs."""

    def __init__(self) -> None:
        command = ["env", *TARGET, sys.executable, "-c", BOOT, json.dumps(sys.path)]
        self.owner, self.said = os.getpid(), tempfile.TemporaryFile("a+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.said, text=True)
        atexit.register(self.end)

    def alive(self) -> bool:
        """Can it be asked? Not by a fork of its owner: both would read each other's answers."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: str, count: int) -> dict[int, Outcome]:
        """What became of a request's `count` jobs, by index; of fewer, if the process ends."""
        found: dict[int, Outcome] = {}
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            while len(found) < count and (line := self.process.stdout.readline()):
                i, reason, seconds = json.loads(line)
                found[i] = Outcome(reason, seconds)
        except BrokenPipeError:
            pass
        finally:
            if len(found) < count:  # also if interrupted: what is still to come must not answer the next request
                self.end()
        return found

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self.said.seek(0)
        return self.said.read().strip()[-500:]

    def end(self) -> None:
        """Ends it, if it is ours to end."""
        if self.owner == os.getpid():
            self.process.terminate()
            self.process.communicate()
        atexit.unregister(self.end)


_lock = threading.Lock()
_running: list[Compiler] = []  # at most one


def warm_up() -> None:
    """Starts the compiling process if there is none: what it imports takes seconds, in which a caller can work."""
    with _lock:
        _compiler()


def _compiler() -> Compiler:
    if not (_running and _running[0].alive()):
        _running[:] = [Compiler()]
    return _running[0]


def _asked(jobs: list[Job], directory: str, workers: int | None) -> list[Outcome]:
    """What became of each job."""
    count = min(workers or len(os.sched_getaffinity(0)), MAX_WORKERS, len(jobs))
    request = json.dumps([count, directory, [[job.region.text, list(job.config), job.swapped] for job in jobs]])
    found, said = dict[int, Outcome](), ""
    with _lock:
        for _ in range(2):  # it may just have ended, idle
            if len(found) < len(jobs):
                compiler = _compiler()
                found = compiler.ask(request, len(jobs))
                said = said or compiler.last_words()
    lost = Outcome(f"the compiling process ended early: {said}", 0.0)
    return [found.get(i, lost) for i in range(len(jobs))]
