"""A card that is nearly full: measuring takes no more than is free beside the model, and says so where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import close, half, left_to_inductor, pretend, run, streams
from live_bytes import Live

from coda_inductor.core.errors import Unsupported
from coda_inductor.measure import free_memory, timing
from coda_inductor.tuning import benchmark, measurements
from coda_inductor.tuning.footprint import footprint

pytestmark = pytest.mark.usefixtures("uncached")

BF16 = torch.bfloat16
CARD = 80 << 30


class Card:
    """A GPU of which so many bytes are free: some that no process has, some that torch holds and gives to none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unused: int, held: int = 0, allowed: float = 1.0) -> None:
        self.unused, self.held, self.emptied = unused, held, 0
        self.in_use = 8 << 30
        patch = monkeypatch.setattr
        patch(torch.cuda, "mem_get_info", lambda device=None: (self.unused, CARD))
        patch(torch.cuda, "memory_reserved", lambda device=None: self.in_use + self.held)
        patch(torch.cuda, "memory_allocated", lambda device=None: self.in_use)
        patch(torch.cuda, "get_per_process_memory_fraction", lambda device=None: allowed, raising=False)
        patch(torch.cuda, "empty_cache", self.empty)

    def empty(self) -> None:
        self.emptied += 1
        self.unused, self.held = self.unused + self.held, 0


FIXED = free_memory.BESIDE + free_memory.CHECK


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    Card(monkeypatch, 3 << 30, 1 << 30)
    assert free_memory.free(device) == 4 << 30
    Card(monkeypatch, 3 << 30, 1 << 30, allowed=0.125)  # 10 GiB in all, of which 8 are in use
    assert free_memory.free(device) == 2 << 30
    free_memory.require(device, (2 << 30) - FIXED)
    with pytest.raises(Unsupported, match=r"takes 2\.15 GB of GPU memory, and 2\.15 GB are free"):
        free_memory.require(device, (2 << 30) - FIXED + 1)


def test_without_a_gpu_nothing_is_asked() -> None:
    free_memory.require(torch.device("cpu"), 1 << 60)
    with free_memory.given_back(torch.device("cpu")):
        pass


def test_nothing_is_measured_on_a_full_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line says so; no tensor is made, nothing is remembered, and with room all is measured."""
    pretend(monkeypatch, tmp_path)
    made = list[object]()
    with monkeypatch.context() as patch:
        Card(patch, FIXED)
        patch.setattr(timing, "compared", lambda *args, **how: made.append(args))
        patch.setattr(benchmark.Programs, "baseline", lambda *args: made.append(args))
        ran = left_to_inductor("of GPU memory, and 0.54 GB are free (compile before memory is filled, or")
    assert ran[0].startswith("coda_inductor: a region is left to Inductor: ") and "measuring it takes 0.54 GB" in ran[0]
    assert made == [] and not list((tmp_path / "kernels").rglob("contest-*"))
    card = Card(monkeypatch, FIXED + (64 << 20))
    ran = run(half(BF16), *streams(BF16))
    assert ran == [] and ran.regions == [3] and card.emptied == 0


def test_with_room_for_some_these_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    needs = list[int]()
    whole: Callable[..., None] = free_memory.require

    def require(device: torch.device, needed: float) -> None:
        needs.append(int(needed))
        whole(device, needed)

    monkeypatch.setattr(free_memory, "require", require)
    Card(monkeypatch, CARD)
    assert run(half(BF16), *streams(BF16)).regions == [3]
    (tmp_path / "again").mkdir()
    pretend(monkeypatch, tmp_path / "again")
    Card(monkeypatch, FIXED + (min(needs) + max(needs)) // 2)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and "of GPU memory" in ran[0] and min(needs) < max(needs)
    (report,) = ran.reports
    assert 0 < len(report.sites) < 3 and any("GPU memory" in r.reason for r in report.refused)


def test_what_measuring_has_reserved_goes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    card, whole = Card(monkeypatch, CARD // 2), timing.compared

    def compared(*args: Any, **how: Any) -> Any:
        card.unused, card.held = card.unused - 1024, card.held + 1024
        return whole(*args, **how)

    monkeypatch.setattr(timing, "compared", compared)
    run(half(BF16), *streams(BF16))
    assert card.emptied == 1 and card.held == 0


def test_the_footprint_is_what_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All tensors of one group's measurement, but for what the check of a kernel takes: no more than is said, and at
    least half of it."""
    pretend(monkeypatch, tmp_path)
    whole, peaks, said = measurements.Measurements.measure, list[int](), list[int]()

    def measure(self: measurements.Measurements, group: Any, plan: Any) -> Any:
        with Live() as live:
            found = whole(self, group, plan)
        peaks.append(live.peak)
        said.append(footprint(group, plan))
        return found

    monkeypatch.setattr(measurements.Measurements, "measure", measure)
    run(half(BF16), *streams(BF16, tokens=2048))
    assert len(said) == 2
    checked = 768 * 128 * 4 * 8
    for peak, most in zip(peaks, said, strict=True):
        assert most / 2 <= peak <= most + checked, (peaks, said)
