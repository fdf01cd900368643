"""The compiling process of prebuild.py. Imports the compiler, so nothing imports it.

It imports once (3-8 s) and forks a worker for each core and request. Nothing has run before a fork: no kernel was
compiled, no GPU is visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from coda_inductor.codegen.target import of_name
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import parse
from coda_inductor.kernels import kernel, prebuild

PR_SET_PDEATHSIG = 1  # prctl(2)
IDLE_S = 60.0  # after which it ends; it holds 330 MB
NICE = 10
ATTEMPTS = 2  # at jobs that were lost with another's worker

Done = tuple[int, str, float]


def serve() -> None:
    """Answers requests (a line of JSON each: workers, directory, jobs) until there are no more: for each job, when it
    is done, a line [its index, why it failed, seconds]."""
    answers = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: ends at once, and the workers with it
    kernel.without_gpu()
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        for done in compiled(answers, *json.loads(line)):
            try:
                os.write(answers, (json.dumps(done) + "\n").encode())
            except BrokenPipeError:  # nobody reads any more; without waiting for what is under way
                os._exit(1)


def compiled(answers: int, workers: int, directory: str, jobs: list[Any]) -> Iterator[Done]:
    """What becomes of each job, in the order in which they end. When a worker dies its pool loses what is not done.
    What is left after some attempts is tried alone, so that no other job is held to have ended the process."""
    left = dict(enumerate(jobs))
    for _ in range(ATTEMPTS):
        for i, reason, seconds in pooled(answers, workers, directory, left) if left else ():
            del left[i]
            yield i, reason, seconds
    for i in left:
        yield next(pooled(answers, 1, directory, {i: left[i]}), (i, prebuild.ENDED, 0.0))


def pooled(answers: int, workers: int, directory: str, jobs: dict[int, Any]) -> Iterator[Done]:
    """What becomes of the jobs of one pool, but for those that are lost with it."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, forking, initializer=born, initargs=(answers, os.getpid())) as pool:
        running: dict[Future[tuple[str, float]], int] = {}
        with contextlib.suppress(BrokenProcessPool):
            for i, job in jobs.items():
                running[pool.submit(build, directory, *job)] = i
        for future in as_completed(running):
            with contextlib.suppress(BrokenProcessPool):
                yield (running[future], *future.result())


def born(answers: int, parent: int) -> None:
    """In a worker: ends with its parent, and does not keep the pipe open whose end says that the parent is gone. Gives
    way to who measures meanwhile."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.close(answers)
    os.nice(NICE)


def build(directory: str, text: str, fields: list[Any], swapped: bool, target: str) -> tuple[str, float]:
    """Compiles one kernel into the store: why not ("": it is there), and the seconds taken."""
    start = time.perf_counter()
    try:
        kernel.Compiled(parse(text), Config(*fields), Path(directory), swapped=swapped, target=of_name(target))
        reason = ""
    except Unsupported as refusal:
        reason = " ".join(str(refusal).split())
    except Exception as error:  # it happens again, and is decided on, where the kernel is used
        reason = f"{type(error).__name__}: {error}"
    return reason, time.perf_counter() - start
