"""What the benches make of their measurements."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from coda_inductor.measure import timing


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    monkeypatch.setattr(sys, "argv", ["bench"])
    return importlib.import_module


def test_difference_hides_nothing_but_rounding(bench: Callable[[str], ModuleType]) -> None:
    difference, one, off = bench("training").difference, torch.ones(4), torch.ones(4) * float("nan")
    assert difference(one, one) == 0 and difference(0 * one, 0 * one) == 0
    assert difference((one, 1.1 * one), (one, one)) == pytest.approx(0.1)
    assert difference((one, 1e-6 * one), (one, -1e-6 * one)) == pytest.approx(0.02)  # rounding, of what should be zero
    assert difference((one, one), (one, 1e-6 * one)) > 1e3
    assert all(math.isnan(difference(*pair)) for pair in (((one, off), (one, one)), ((one, one), (one, off))))


def test_programs_of_a_row_are_measured_in_either_order(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, seen = bench("layers"), list[list[float]]()

    def repeated(calls: Sequence[Callable[[], object]], about: Sequence[float]) -> list[float]:
        seen.append(list(about))
        return [ms + (0.5 if i == 0 else -0.5) for i, ms in enumerate(about)]  # who is first is slower

    monkeypatch.setattr(timing, "repeated", repeated)
    monkeypatch.setattr(layers.time, "sleep", lambda seconds: None)
    calls = [lambda inputs: None] * 6
    assert layers.alone(calls, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2) == [1.0, 2.0, 3.0, 4.0, 5.5, 6.5]
    assert seen == [[1, 2], [2, 1]] * 2 + [[3, 4], [4, 3]] * 2 + [[5], [5], [6], [6]]
