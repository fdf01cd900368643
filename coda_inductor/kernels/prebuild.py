"""Many kernels at once: worker processes compile into the store, from where a launch loads each in milliseconds.

A compile is one thread of 1-4 s, and tuning a model takes dozens. One plain Python process, started ahead of the first
request, imports the compiler and forks the workers (no fork of a process that holds CUDA, no guard needed in the user's
script); it sees no GPU. A kernel that fails here fails again, with its reason, where it is used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A, of_name
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels import library
from coda_inductor.kernels.store import open_store

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from coda_inductor.kernels import worker; worker.serve()"
)
MAX_WORKERS = 16
ENDED = "its compile ended the compiling process"
ABORTED = set[Path]()
"""Where kernels would lie whose compile ended three workers, the last by itself, as aborts of the compiler do: this
process, which is the user's, does not try. Another process finds out anew."""
LAST_BYTES = 500


class Job(NamedTuple):
    """One kernel to build."""

    region: Region
    config: Config
    swapped: bool = False
    target: str = SM_90A.name

    def place(self, directory: Path) -> Path:
        """Where it will lie. Raises Unsupported if it cannot exist."""
        row = of_name(self.target)
        legality.require(self.region, self.config, row)
        return library.folder(self.region, self.config, directory, swapped=self.swapped, target=row)

    def request(self) -> list[Any]:
        """What a worker is told."""
        return [self.region.text, list(self.config), self.swapped, self.target]


class Outcome(NamedTuple):
    """What became of a job: why it failed ("": it did not), and the seconds that compiling or loading took."""

    reason: str
    seconds: float


def prebuild(jobs: Iterable[Job], cache_dir: str | None = None, *, workers: int | None = None) -> dict[Job, str]:
    """Builds the kernels in `workers` processes (None: one per core) and returns the reasons of those that failed."""
    return {job: made.reason for job, made in outcomes(jobs, cache_dir, workers=workers).items() if made.reason}


def begin(
    jobs: Iterable[Job], cache_dir: str | None = None, *, over: threading.Event | None = None
) -> dict[Job, Future[Outcome]]:
    """Builds the kernels meanwhile, those first that come first. What becomes of each job can be awaited. With `over`
    they are idle work: as many as there are workers at a time, they give way to what is begun without it, and once it
    is set the rest is given up."""
    directory, made = open_store(cache_dir), dict[Job, Future[Outcome]]()
    refused, todo = distinct(jobs, directory)
    for job, outcome in refused.items():
        made[job] = Future()
        made[job].set_result(outcome)
    made |= {job: Future() for alike in todo for job in alike}
    if not todo:
        return made
    size = len(todo) if over is None else _workers()

    def known(part: list[list[Job]], i: int, outcome: Outcome) -> None:
        for job in part[i]:
            made[job].set_result(outcome)

    def work() -> None:  # nothing here makes tensors: it may be cut off when the interpreter ends
        try:
            for start in range(0, len(todo), size):
                part = todo[start : start + size]
                if _turn(over):
                    _ask([alike[0] for alike in part], directory, None, functools.partial(known, part))
                else:
                    for i in range(len(part)):
                        known(part, i, Outcome("not asked for any more", 0.0))
        except BaseException as error:
            for future in made.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            _pressing.discard(id(made))

    if over is None:
        _pressing.add(id(made))
    try:
        threading.Thread(target=work, name="coda_inductor.prebuild", daemon=True).start()
    except BaseException:  # no thread is to be had
        _pressing.discard(id(made))
        raise
    return made


def outcomes(jobs: Iterable[Job], cache_dir: str | None = None, *, workers: int | None = None) -> dict[Job, Outcome]:
    """`prebuild`, with what became of every job."""
    directory = open_store(cache_dir)
    made, todo = distinct(jobs, directory)
    _ask(
        [alike[0] for alike in todo],
        directory,
        workers,
        lambda i, outcome: made.update(dict.fromkeys(todo[i], outcome)),
    )
    return made


def distinct(jobs: Iterable[Job], directory: Path) -> tuple[dict[Job, Outcome], list[list[Job]]]:
    """The jobs that cannot be done, and the others, those together that are one kernel: Regions that differ in extents
    only."""
    refused, same = dict[Job, Outcome](), dict[Path, list[Job]]()
    for job in dict.fromkeys(jobs):
        try:
            place = job.place(directory)
        except Unsupported as refusal:
            refused[job] = Outcome(str(refusal), 0.0)
        else:
            same.setdefault(place, []).append(job)
    return refused, [*same.values()]


class Compiler:
    """The process that imports the compiler for a target. A request is a line to its stdin; the answers, a line for
    each job, come through a pipe of their own: anything may print."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.owner, self.said = os.getpid(), tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = os.pipe()
        self.answers = open(ours, "rb", buffering=0)  # noqa: SIM115 (a buffer has a lock, which a fork would inherit)
        environment = ("env", *of_name(target).environment, "CUDA_VISIBLE_DEVICES=")
        command = [*environment, sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs)]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self.said, stderr=self.said, pass_fds=(theirs,), bufsize=0
            )
        finally:
            os.close(theirs)
        atexit.register(self.end)

    def alive(self) -> bool:
        """Can it be asked? Not by a fork of its owner: both would read each other's answers."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: str, count: int, known: Callable[[int, Outcome], None]) -> set[int]:
        """Says what became of each of a request's `count` jobs, by index; of which: not all, if the process ends."""
        found = set[int]()
        assert self.process.stdin is not None
        todo, rest = memoryview(request.encode() + b"\n"), b""
        try:
            while todo:
                todo = todo[self.process.stdin.write(todo) :]
            while len(found) < count and (read := self.answers.read(1 << 16)):
                *lines, rest = (rest + read).split(b"\n")
                for i, reason, seconds in map(json.loads, lines):
                    found.add(i)
                    known(i, Outcome(reason, seconds))
        except BrokenPipeError:
            pass
        except BaseException:  # interrupted: what is still to come must not answer the next request
            self.end()
            raise
        if len(found) < count:
            self.process.wait()
        return found

    def last_words(self) -> str:
        """The end of what it printed. Read without moving the offset, at which it writes."""
        size = os.fstat(self.said.fileno()).st_size
        return os.pread(self.said.fileno(), LAST_BYTES, max(0, size - LAST_BYTES)).decode(errors="replace").strip()

    def end(self) -> None:
        """Ends it, if it is ours to end."""
        if self.owner == os.getpid():
            self.process.terminate()
            with contextlib.suppress(ValueError):  # another thread is at it
                self.process.communicate()
        atexit.unregister(self.end)


_lock = threading.Lock()
_running: list[Compiler] = []  # at most one for each target
_pressing: set[int] = set()  # what was begun that is not idle, and has not ended


def _unlock() -> None:
    """In a fork: nobody is left who would."""
    global _lock
    _lock = threading.Lock()
    _pressing.clear()


os.register_at_fork(after_in_child=_unlock)


def warm_up(target: str = SM_90A.name) -> None:
    """Starts a target's compiling process if there is none: what it imports takes seconds, in which a caller can work.
    What keeps it from starting is said when a kernel is asked for."""
    if _lock.acquire(blocking=False):
        try:
            _compiler(target)
        except OSError:
            pass
        finally:
            _lock.release()


def _compiler(target: str) -> Compiler:
    _running[:] = [compiler for compiler in _running if compiler.alive()]
    found = next((compiler for compiler in _running if compiler.target == target), None)
    if found is None:
        found = Compiler(target)
        _running.append(found)
    return found


def _turn(over: threading.Event | None) -> bool:
    """Waits until idle work may go on; False if it is given up."""
    while over is not None and _pressing and not over.is_set():
        time.sleep(0.05)
    return over is None or not over.is_set()


def _workers() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def _ask(jobs: list[Job], directory: Path, workers: int | None, known: Callable[[int, Outcome], None]) -> None:
    """Says what became of each job, by index: one target's after another's."""
    of_targets: dict[str, list[int]] = {}
    for i, job in enumerate(jobs):
        of_targets.setdefault(job.target, []).append(i)
    for name, some in of_targets.items():

        def known_of(i: int, outcome: Outcome, some: list[int] = some) -> None:
            known(some[i], outcome)

        _ask_for(name, [jobs[i] for i in some], directory, workers, known_of)


def _ask_for(
    name: str, jobs: list[Job], directory: Path, workers: int | None, known: Callable[[int, Outcome], None]
) -> None:
    """As `_ask`, of jobs for the target of that name."""
    count = min(workers or _workers(), MAX_WORKERS, len(jobs))
    request = json.dumps([count, str(directory.absolute()), [job.request() for job in jobs]])
    with _lock:
        compiler = _compiler(name)

        def heard(i: int, outcome: Outcome) -> None:
            if outcome.reason == ENDED:
                ABORTED.add(jobs[i].place(directory))
            known(i, outcome)

        found = compiler.ask(request, len(jobs), heard)
        if not found and compiler.process.returncode == 0:  # it had just ended, idle
            compiler = _compiler(name)
            found = compiler.ask(request, len(jobs), heard)
        said = compiler.last_words() if len(found) < len(jobs) else ""
    for i in range(len(jobs)):
        if i not in found:
            known(i, Outcome(f"the compiling process ended early: {said}", 0.0))
