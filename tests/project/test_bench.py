"""What the benches make of their measurements."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

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


def row(
    model: str, mode: str, family: str, moved: tuple[int, int], kept: tuple[int, int], **more: Any
) -> dict[str, Any]:
    """A row of coverage.py; `moved` and `kept` are GB, by Inductor and by ours."""
    before, after, theirs, ours = (10**9 * n for n in (*moved, *kept))
    made_by = {"versions": {"torch": "2.13.0"}, "commit": "1234567"}
    counts = {"kernels_before": 9, "kernels_after": 4, "passes_left_per_layer": 1.5, "seconds": 2.6, "coverage": 0.75}
    moves = {"bytes_before": before, "bytes_after": after, "saved_bytes_inductor": theirs, "saved_bytes": ours}
    return {"model": model, "mode": mode, "family": family, "dense": True, **counts, **moves, **made_by, **more}


def test_page_of_coverage(bench: Callable[[str], ModuleType]) -> None:
    missing = {"model": "eva", "mode": "train", "family": "vision", "dense": True, "skipped": "No module named 'timm'"}
    rows = [
        row("eva", "infer", "vision", (2, 3), (0, 0), coverage=0.25),
        missing | {"versions": {"torch": "2.13.0"}, "commit": "1234567"},
        row("llama", "train", "decoder", (8, 2), (100, 103)),
        row("mamba", "infer", "state space", (8, 8), (0, 0), dense=False),
        row("gpt", "infer", "decoder", (8, 2), (0, 0)),
    ]
    lines = bench("coverage_page").rendered(rows).splitlines()
    assert "Counted at 1234567, with:" in lines and "torch 2.13.0." in lines
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| decoder | llama * | training | 0.750 | 9 → 4 | 1.5 | 8.00 → 2.00 | 100.00 → **103.00** | 3 |",
        "| decoder | gpt * | inference | 0.750 | 9 → 4 | 1.5 | 8.00 → 2.00 |  | 3 |",
        "| state space | mamba | inference | 0.750 | 9 → 4 | 1.5 | 8.00 → 8.00 |  | 3 |",
        "| vision | eva * | inference | 0.250 | 9 → 4 | 1.5 | 2.00 → **3.00** |  | 3 |",
        "| vision | eva * | training | skipped: No module named 'timm' | | | | | |",
    ]
    assert lines[-8:] == [
        "- Mean coverage of inference over the 2 dense transformers: 0.500.",
        "- Mean coverage of training over the 1 dense transformers: 0.750.",
        "- Of 4 runs 1 move more bytes than before:",
        "  - vision: eva (inference)",
        "- Of 1 training runs 1 keep more than 1.02 times Inductor's bytes:",
        "  - decoder: llama (training)",
        "- Of 5 runs 1 were skipped:",
        "  - vision: eva (training)",
    ]


def test_coverage_of_small_models(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coverage, cases = bench("coverage"), bench("coverage_cases")
    small = cases.sizes(64, 128, 4, 4, 96)
    inputs = cases.tokens(2, 128)
    models = {
        "llama": cases.decoder("Llama", small, 2, 128),
        "elsewhere": cases.Case("vision", "model", "", {}, inputs, package="no_such_package"),
        "wrong": cases.decoder("Llama", small | {"num_attention_heads": "four"}),
    }
    monkeypatch.setattr(coverage, "MODELS", models)
    out, page = tmp_path / "rows.jsonl", tmp_path / "models.md"
    coverage.main(["--out", str(out), "--write", str(page)])
    rows = coverage.read(str(out))
    assert [(r["model"], r["mode"]) for r in rows] == [(name, mode) for name in models for mode in ("infer", "train")]
    infer, train = rows[:2]
    assert infer["coverage"] > 0.5 and infer["bytes_after"] < infer["bytes_before"] and not infer["saved_bytes"]
    assert train["coverage"] > 0.1 and train["saved_bytes"] > 0 and train["left"] and train["commit"]
    assert all("skipped" in r for r in rows[2:4]) and all("error" in r for r in rows[4:])
    coverage.main(["--rows", str(out), "--write", str(tmp_path / "again.md")])
    assert (tmp_path / "again.md").read_text() == page.read_text()


def test_a_model_that_takes_too_long_is_cut(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    coverage = bench("coverage")
    monkeypatch.setattr(coverage, "counted", lambda case, mode: time.sleep(30))
    assert coverage.row_of("llama3_8b", "infer", 1)["error"] == "took longer than 1 s"


def test_thirty_one_models_are_dense(bench: Callable[[str], ModuleType]) -> None:
    models = bench("coverage_zoo").MODELS
    assert len(models) == 46 and sum(case.dense for case in models.values()) == 31
