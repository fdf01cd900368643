"""The kernels that tuning asks for, each compiled once, and those that it may yet ask for, in idle time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from coda_inductor.kernels import prebuild


class Ahead:
    """What was begun, in the worker processes of prebuild.py."""

    def __init__(self, cache_dir: str | None) -> None:
        self.cache_dir = cache_dir
        self.made = dict[prebuild.Job, Future[prebuild.Outcome]]()
        self._idle = set[prebuild.Job]()  # of these, what nobody has asked for
        self._over = threading.Event()

    def begin(self, jobs: Iterable[prebuild.Job], *, idle: bool = False) -> int:
        """Begins what is not begun, or was idle work and is not done; how many. With `idle` nobody asks for it yet."""
        waiting = set() if idle else {job for job in self._idle if not self.made[job].done()}
        new = [job for job in dict.fromkeys(jobs) if job not in self.made or job in waiting]
        made = prebuild.begin(new, self.cache_dir, over=self._over if idle else None)
        self.made |= made
        self._idle = self._idle | made.keys() if idle else self._idle - made.keys()
        return len(made)

    def wait(self, jobs: Iterable[prebuild.Job]) -> None:
        """Until those of the jobs that were begun are done."""
        for job in jobs:
            if job in self.made:
                self.made[job].result()

    def end(self) -> None:
        """Gives idle work up that is not under way."""
        self._over.set()
        self._over = threading.Event()
