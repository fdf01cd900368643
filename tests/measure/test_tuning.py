"""Tiles are tried for a Region: which are timed, how far, and that one with a wrong output is not taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from codegen_cases import bias_sums, random_inputs, token_scale
from compiling import Interpreted, pretend
from fake_stream import Stream
from fake_stream import stream as stream
from torch import Tensor

from coda_inductor.codegen import legality
from coda_inductor.core import blocks
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.kernels import launch, proof
from coda_inductor.measure import timing, tune
from coda_inductor.measure.timing import Times


class Spilled(Interpreted):
    """A kernel that is right and spills much."""

    stack = 512


class Wrong(Interpreted):
    """A kernel that leaves its outputs as they were."""

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        pass


def test_an_error_in_any_output_is_found() -> None:
    """On the rows and columns that are compared; what follows from correct stores and sums is no error."""
    region = bias_sums(1000, 16)
    inputs = random_inputs(region, 900, "cpu")
    right = interpret(region, inputs)
    assert [out.shape for out in blocks.outputs(region, inputs)] == [out.shape for out in right]
    assert tune.worst_error(region, inputs, right) < 1e-6
    for i in range(len(right)):
        for place in (0, -1):
            wrong = [out.clone() for out in right]
            wrong[i][place] += 1000.0
            assert tune.worst_error(region, inputs, wrong) > proof.TOLERANCE
            wrong[i][place] = float("nan")
            assert not tune.worst_error(region, inputs, wrong) < proof.TOLERANCE


def test_a_tile_without_a_rival_is_timed_no_further(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By turns alone; with one there is a burst for both."""
    pretend(monkeypatch, tmp_path)
    region = token_scale(64, 64)
    inputs = random_inputs(region, 300, "cpu")
    for ratio, rivals in ((1.05, 1), (1.03, 2)):

        def rated(calls: Sequence[Callable[[], object]], rounds: int, ratio: float = ratio, **how: Any) -> list[Times]:
            assert how["level"] == 0.06 and how["slack"] == 1.04 and not how["ratios"]
            turns = [1.0, ratio, *([2.0] * (len(calls) - 2))]
            busy = how["decided"](turns)
            return [Times(ms, math.inf if busy or ms > how["slack"] else ms) for ms in turns]

        with monkeypatch.context() as patch:
            patch.setattr(timing, "compared", rated)
            rows = tune.tune(region, inputs, str(tmp_path / str(rivals))).rows
        assert [("ms" in row, "busy_ms" in row) for row in rows[:3]] == [
            (True, rivals > 1), (rivals > 1, rivals > 1), (False, False)
        ]  # fmt: skip


def test_what_runs_beside_tiles_is_timed_where_none_is_right(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, Wrong)
    region, asked = token_scale(64, 64), list[bool]()

    def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[Times]:
        asked.append(how["decided"]([1.0]) or not how["ratios"])
        return [Times(1.0, 1.0)] * len(calls)

    monkeypatch.setattr(timing, "compared", compared)
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    config = legality.candidates(region, 8192)[0]
    (row,) = tune.measure(kernel, random_inputs(region, 300, "cpu"), [config], beside=[lambda: None])
    assert asked == [False] and "why" in row and row["beside"] == [1.0]


def test_tuning_where_no_tile_qualifies(stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All spill: the least is taken. None is right: the Region is not supported."""
    region, compared = token_scale(64, 64), timing.compared
    inputs = random_inputs(region, 300, "cpu")
    for build in (Spilled, Wrong):
        with monkeypatch.context() as patch:
            pretend(patch, tmp_path / build.__name__, build)
            patch.setattr(timing, "compared", compared)
            patch.setattr(timing, "BURST_MS", 201)  # these kernels take none of its time
            store = str(tmp_path / f"{build.__name__}-store")
            if build is Spilled:
                rows = tune.tune(region, inputs, store).rows
                assert ["ms" in row for row in rows] == [True] + [False] * (len(rows) - 1)
            else:
                with pytest.raises(Unsupported, match=r"no configuration .* is right"):
                    tune.tune(region, inputs, store)
