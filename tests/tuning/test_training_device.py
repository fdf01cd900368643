"""Training on a machine that is pretended: the real contest, lowering and wrapper; the interpreter for the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from compiling import pretend
from trained_layers import MODELS, trained

from coda_inductor.kernels import launch
from coda_inductor.measure import timing

pytestmark = pytest.mark.usefixtures("uncached")


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_what_is_derived_is_launched(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    (report,) = trained(name).reports
    assert len(report.sites) > 10 and not launch.FALLBACKS
    assert sum(launch.LAUNCHES.values()) == len(report.sites)
    assert set(launch.LAUNCHES) == {site.region.digest for site in report.sites}


@pytest.mark.parametrize("name", MODELS)
def test_any_losses_leave_a_right_program(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A contest in which every third group loses."""
    pretend(monkeypatch, tmp_path)
    chance = random.Random(0)

    def timed(calls: Sequence[Callable[[], object]], rounds: int, **how: object) -> list[timing.Times]:
        for call in calls:
            call()
        lost = len(calls) == 2 and chance.random() < 0.3
        return [timing.Times(ms, ms) for ms in ([2.0, 1.0] if lost else [1.0 + i for i in range(len(calls))])]

    monkeypatch.setattr(timing, "compared", timed)
    (report,) = trained(name).reports
    assert any("measured slower" in r.reason for r in report.refused)
