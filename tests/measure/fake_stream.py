"""A stream of a GPU that is not there, whose calls take the times that they say."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import pytest
import torch

from coda_inductor.measure import timing


class Stream:
    """A GPU that runs a call as soon as it is launched. `power` slows all down while it is above 1: each launch lowers
    or raises the clock towards what the last ones drew, as a GPU's limit does."""

    def __init__(self) -> None:
        self.now_ms, self.host_s, self.heat = 0.0, 0.0, 0.0
        self.awaited = True
        self.launched = list[str]()

    def call(self, name: str, ms: float, *, power: float = 1.0, launch_s: float = 1e-6) -> Callable[[], None]:
        """A call of `ms` at full clock."""

        def run() -> None:
            self.launched.append(name)
            self.host_s += launch_s
            share = min(1.0, ms / 10)
            self.heat += share * (power - self.heat)
            self.now_ms += ms * max(1.0, self.heat)

        return run


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """In place of the current one; its company draws 1.0 and takes 0.02 ms."""
    made = Stream()

    class Event:
        def __init__(self, **_: object) -> None:
            self.at = math.nan

        def record(self) -> None:
            self.at, made.awaited = made.now_ms, False

        def elapsed_time(self, later: Event) -> float:
            assert made.awaited
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(made, "awaited", True))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def rest(seconds: float) -> None:
        made.host_s += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: made.host_s, sleep=rest)
    monkeypatch.setattr("coda_inductor.measure.timing.time", clock)
    monkeypatch.setattr(timing, "company_on", lambda device: made.call("company", 0.02))
    return made
