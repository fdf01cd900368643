"""Kernels that do not compile, are wrong or do not fit: their Regions are left to Inductor, with one warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import HERE, Interpreted, close, half, left_to_inductor, pretend, raised, run, streams
from failing_kernels import Illegal, Nan, OutOfMemory, Wrong, build_fails

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Region
from coda_inductor.measure import timing

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("build", "tune_", "said"),
    [
        (build_fails, "quick", "nvvm says no"),
        (build_fails, "off", "nvvm says no"),
        (Wrong, "quick", "is right: relative error"),
        (Nan, "quick", "is right: relative error nan"),
        (OutOfMemory, "quick", "out of memory while it was measured (compile before memory is filled"),
    ],
)
def test_kernel_that_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Any, tune_: str, said: str
) -> None:
    """It does not compile, is wrong, or does not fit: the Regions are left to Inductor, with one warning for all."""
    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune_)
    ran = left_to_inductor(said)
    assert ran[0].startswith("coda_inductor: a region is left to Inductor: ") and HERE in ran[0]
    assert not list((tmp_path / "kernels").rglob("*.json"))  # a failure is not remembered
    raised(monkeypatch, HERE, said, "Unsupported: ")


def test_one_kernel_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(region: Region, config: Config, directory: Path, **how: Any) -> Any:
        return (build_fails if len(region.products) == 2 else Interpreted)(region, config, directory)

    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and ran.regions and ran.regions[0] > 0
    assert all(len(site.region.products) == 1 for site in ran.reports[0].sites)


def test_error_while_tuning_that_nobody_expects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An illegal address, say: nothing that runs after it can be believed, so the whole graph is left."""

    pretend(monkeypatch, tmp_path, Illegal)
    left_to_inductor("RuntimeError: CUDA error: an illegal memory access")


def test_a_loser_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(timing, "compared", lambda calls, rounds, **how: [timing.Times(1.0, 1.0)] * len(calls))
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions == [0]
