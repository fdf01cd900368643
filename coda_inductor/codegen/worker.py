"""The compiling process of prebuild.py. Imports the compiler, so nothing imports it.

It imports once (3-8 s) and forks a worker for each core and request. Nothing has run before a fork: no kernel was
compiled, no GPU is visible.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from coda_inductor.codegen import kernel
from coda_inductor.codegen.legality import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import parse

PR_SET_PDEATHSIG = 1  # prctl(2)
IDLE_S = 120.0  # after which it ends: 300 MB


def serve() -> None:
    """Answers requests (a line of JSON each: workers, directory, jobs) until there are no more: for each job, when it
    is done, a line [its index, why it failed, seconds]."""
    answers = os.dup(1)
    os.dup2(2, 1)  # a compiler may print
    kernel.without_gpu()
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        for answer in compiled(answers, *json.loads(line)):
            os.write(answers, (json.dumps(answer) + "\n").encode())


def compiled(answers: int, workers: int, directory: str, jobs: list[Any]) -> Iterator[tuple[int, str, float]]:
    """What becomes of each job, in the order in which they end."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, forking, initializer=born, initargs=(answers,)) as pool:
        running: dict[Future[tuple[str, float]], int] = {}
        for i, job in enumerate(jobs):
            try:
                running[pool.submit(build, directory, *job)] = i
            except RuntimeError as error:  # a worker died, and with it the pool
                yield i, died(error), 0.0
        for future in as_completed(running):
            failure = future.exception()
            yield (running[future], *(future.result() if failure is None else (died(failure), 0.0)))


def born(answers: int) -> None:
    """In a worker: ends with its parent, and does not keep the pipe open whose end says that the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(answers)


def died(error: BaseException) -> str:
    """Why the jobs at hand have no kernel."""
    return f"the compiling process ended early: {error}"


def build(directory: str, text: str, fields: list[Any], swapped: bool) -> tuple[str, float]:
    """Compiles one kernel into the store: why not ("": it is there), and the seconds taken."""
    start = time.perf_counter()
    try:
        kernel.Compiled(parse(text), Config(*fields), Path(directory), swapped=swapped)
        reason = ""
    except Unsupported as refusal:
        reason = " ".join(str(refusal).split())
    return reason, time.perf_counter() - start
