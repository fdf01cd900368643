"""Tables, figures and plots of the pages are those of bench/results, and a row that changes is seen."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

Importer = Callable[[str], ModuleType]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Importer:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The pages, the plots and the rows, to be changed."""
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    return tmp_path


def append(results: Path, file: str, *rows: dict[str, Any]) -> None:
    with (results / file).open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def test_pages_and_plots_are_those_of_the_rows(bench: Importer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("pages").main(["--check"]) == 0, capsys.readouterr().out


def test_a_row_that_changes_is_seen_and_mended(bench: Importer, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, results, page = bench("pages"), copy / "bench" / "results", copy / "docs" / "benchmarks.md"
    before = page.read_text()
    row = next(r for r in bench("page_rows").read("training.jsonl")[::-1] if r["case"] == "gpt2-xl")
    append(results, "training.jsonl", row | {"ms": 17.0, "sustained": {"ms": 20.0, "baseline_ms": 16.0}})
    assert pages.main(["--check"], copy, results) == 1
    said = capsys.readouterr().out
    assert "+| GPT-2 XL, 2 layers | training | 16.49 | 17.00 | 10.09 | **0.970x** | **0.800x** | 3.53 → 3.53 |" in said
    assert "-| GPT-2 XL, 2 layers | training | 16.49 | 15.50 | 10.09 | 1.064x | 1.030x | 3.53 → 3.53 |" in said
    assert "docs/plots/gains.svg: was drawn from other rows" in said and "memory.svg: " not in said
    assert [line[:10] for line in said.splitlines() if line.startswith("+|")] == [
        "+| trainin", "+| trainin", "+| GPT-2 X", "+| GPT-2 X",
    ]  # fmt: skip
    assert page.read_text() == before
    assert pages.main(["--no-plots"], copy, results) == 0
    assert pages.main(["--check", "--no-plots"], copy, results) == 0 and page.read_text() != before
    page.write_text(page.read_text().replace("| **0.800x** |", "| 1.030x |"))
    assert pages.main(["--check", "--no-plots"], copy, results) == 1


def test_the_last_row_of_a_case_is_shown(bench: Importer, tmp_path: Path) -> None:
    held = {"ms": 8.0, "baseline_ms": 10.0, "speedup": 1.25}
    row = {
        "case": "a|b", "mode": "infer", "ms": 12.0, "baseline_ms": 10.0, "machine": "NVIDIA H100 80GB HBM3",
        "versions": {"torch": "2.13.0+cu130"}, "gib": 1.5, "baseline_gib": 1.25, "null": 0.9949, "sustained": held,
        "command": "", "date": "",
    }  # fmt: skip
    append(
        tmp_path, "bench.jsonl", row, row | {"mode": "train"}, row | {"ms": 9.0, "gib": 1.0},
        row | {"machine": "NVIDIA H200", "baseline_ms": None, "sustained": None},
        row | {"case": "mine in FP8", "mode": "train", "sustained": {"ms": 10.0, "baseline_ms": 9.0}},
    )  # fmt: skip
    rows, tables = bench("page_rows"), bench("page_tables")
    table = next(table for table in tables.TABLES if table.name == "bench")
    assert rows.rendered(table, tmp_path.parent / "README.md", tmp_path).splitlines() == [
        "| case | card |  | `torch.compile` by turns, ms | coda by turns, ms | gain by turns | gain alone | null | "
        "peak, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a/b | H100 | training | 10.00 | 12.00 | **0.833x** | 1.250x | 0.995x | 1.25 → **1.50** |",
        "| a/b | H100 | inference | 10.00 | 9.000 | 1.111x | 1.250x | 0.995x | 1.25 → 1.00 |",
        "| a/b | H200 | inference |  | 12.00 |  |  | 0.995x | 1.25 → **1.50** |",
        "| mine in FP8 | H100 | training | 10.00 | 12.00 | **0.833x** | **0.900x** | 0.995x | 1.25 → **1.50** |",
        "",
        "H100 and H200, torch 2.13.0. Made by `coda-inductor bench MODULE:FUNCTION`, or"
        " `python bench/zoo.py [--body] NAME`. Rows, with all versions:"
        f" [bench.jsonl]({tmp_path.name}/bench.jsonl).",
    ]
    assert not any(bench("page_values").gains(tmp_path).values())  # they are cases of no class


def test_classes_have_the_cases_that_a_table_names(bench: Importer, tmp_path: Path) -> None:
    """Examples count, a forward is no training, and what was timed by turns only stands apart."""
    row: dict[str, Any] = {"machine": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.13.0"}, "baseline_ms": 10.0}
    append(
        tmp_path, "training.jsonl",
        *(row | {"case": "layer-2048", "mode": mode, "ms": 8.0, "sustained": {"ms": ms, "baseline_ms": 10.0}}
          for mode, ms in (("forward", 12.5), ("train", 8.0))),
        row | {"case": "llama-1b", "mode": "train", "ms": 5.0},
        row | {"case": "vit-l", "mode": "train", "ms": 4.0},
    )  # fmt: skip
    lora = "LoRA of rank 16 on a Llama, width 2048, 4 layers, 8192 tokens"
    append(tmp_path, "examples.jsonl", row | {"case": lora, "mode": "train", "ms": 20.0, "ranks": 1})
    values = bench("page_values")
    assert values.classes(tmp_path, tmp_path).splitlines()[2:] == [
        "| training of width up to 2560 | 2 | **0.500x** | **0.875x** | 1.250x | 2.000x to 2.500x (2) |",
        "| pieces by themselves | 1 | **0.800x** | **0.800x** | **0.800x** |  |",
    ]
    found = values.figures(tmp_path)
    assert found["losses"] == "2 of 5 rows" and found["torch"] == "2.13.0"
    assert found["median of training of width up to 2560"] == "0.88x"


def test_every_row_has_one_class(bench: Importer) -> None:
    """All but those of SWITCHED, and each case that is named has a row."""
    values, names = bench("page_values"), bench("page_names")
    switched = {(file, kind, case) for (file, kind), cases in names.SWITCHED.items() for case in cases}
    listed = [(*place, case) for places in names.CLASSES.values() for place, cases in places.items() for case in cases]
    assert len(listed) == len(set(listed)) and switched.isdisjoint(listed)
    assert {case for case, *_ in values.gained()} == {*listed, *switched}


def test_what_lies_within_the_null_is_in_italics(bench: Importer) -> None:
    rows = bench("page_rows")
    found = [rows.written_gain(*pair) for pair in ((1.011, 0.947), (0.997, 0.99), (1.06, 0.947), (1.002, 1.002))]
    assert found == ["*1.011x*", "***0.997x***", "1.060x", "*1.002x*"]
    assert rows.written_gain(1.011) == "1.011x"


def test_cards_are_counted(bench: Importer) -> None:
    card = bench("page_rows").card
    assert (
        card({"machine": "2 x NVIDIA H200", "ranks": 2}) == card({"machine": "NVIDIA H200", "ranks": 2}) == "2 x H200"
    )
    assert card({"machine": "NVIDIA H100 80GB HBM3, 2 of one host"}) == "2 x H100"
    assert card({"gpu": "NVIDIA H100 80GB HBM3", "ranks": 1}) == "H100" and card({"machine": "mine"}) == "mine"


def test_the_last_five_runs_say_how_far_they_lie_apart(bench: Importer) -> None:
    rows = bench("page_rows")
    found = [{"alone": {"gain": gain}} for gain in (2.0, 1.1, None, 0.9, 1.2, 1.0, 1.05)]
    assert rows.runs(found) == {"count": 5, "least": 0.9, "greatest": 1.2}
    assert rows.runs(found[2:3]) == {"count": 0, "least": None, "greatest": None}


def test_a_loss_is_what_is_written_as_one(bench: Importer) -> None:
    rows = bench("page_rows")
    assert [rows.written_gain(gain) for gain in (0.9994, 0.9996, 1.0, 1.2)] == [
        "**0.999x**", "1.000x", "1.000x", "1.200x",
    ]  # fmt: skip


def test_ten_rows_at_the_front(bench: Importer) -> None:
    rows = [row for source in bench("page_tables").GAINS for row in bench("page_rows").shown(source)]
    assert len(rows) == 10
    assert {row["card"] for row in rows} == {"H100", "H200"} and {row["numbers"] for row in rows} == {"bf16", "FP8"}
    assert {row["kind"] for row in rows} == {"inference", "training"}
    assert any(row["alone"]["gain"] < 1 for row in rows) and all(row["alone"]["gain"] for row in rows)


def test_every_table_has_rows(bench: Importer) -> None:
    rows, tables = bench("page_rows"), bench("page_tables").TABLES
    assert len({table.name for table in tables}) == len(tables)
    for table in tables:
        for source in table.sources:
            assert rows.shown(source) or not (rows.RESULTS / source.file).exists(), (table.name, source.file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: gain -->\n<!-- end -->", "no table is called 'gain'; there are gains, inference"),
        ("<!-- figure: training -->x<!-- end -->", "no figure is called 'training'; there are median of inference"),
        ("<!-- table: gains -->\n<!-- table: models -->\n<!-- end -->", "'gains' has no <!-- end --> before"),
        ("<!-- table: gains -->\n", "a marker has no <!-- end -->"),
        ("<!-- table: a/b -->\n<!-- end -->", "a marker has no <!-- end -->, or a name that cannot be one"),
    ],
)
def test_a_wrong_marker_says_so(text: str, said: str, bench: Importer) -> None:
    pages = bench("pages")
    with pytest.raises(pages.WrongMarker, match=re.escape(said)):
        pages.filled(text, ROOT / "README.md")


def test_a_dated_table_has_the_rows_of_its_commits(bench: Importer, tmp_path: Path) -> None:
    """All of them, and none of later ones; a row that is missing is named."""
    row = {"case": "a", "commit": "1b0ec00 (beside others)", "ms": 0.5, "machine": "NVIDIA H200", "speedup": 0.9}
    later = row | {"commit": "754421a", "versions": {"torch": "2.13.0+cu130"}}
    append(tmp_path, "bench.jsonl", row, row | {"ms": 0.75}, row | {"case": "b"}, later, row | {"ms": 12.5})
    dated = bench("page_dated")
    cells = dated.cells("bench.jsonl", "1b0ec00", "ms; speedup", "us of ms", case="a")
    assert cells[0].written(tmp_path) == "500.0, 750.0 and 12500.0"
    (gain,) = dated.cells("bench.jsonl", "754421a", "speedup", "gain")
    table = dated.Dated(("commit", "gain"), (("754421a", gain),))
    assert table.rendered(tmp_path / "log.md", tmp_path).splitlines() == [
        "| commit | gain |", "| --- | --- |", "| 754421a | **0.900x** |", "",
        "H200, torch 2.13.0. Rows: [bench.jsonl](./bench.jsonl).",
    ]  # fmt: skip
    (missing,) = dated.cells("bench.jsonl", "754421a", "sustained/speedup", "gain", case="a")
    with pytest.raises(dated.NoRow, match=r"bench.jsonl has no row of 754421a with sustained/speedup"):
        missing.written(tmp_path)


def test_the_log_has_each_dated_table(bench: Importer) -> None:
    marked = re.findall(r"<!-- table: log (.*?) -->", (ROOT / "docs" / "log.md").read_text())
    assert sorted(marked) == sorted(bench("page_log").DATED)


def test_dots_of_a_band_do_not_overlap(bench: Importer) -> None:
    plots = bench("page_plots")
    ratios = [1.0, 1.001, 1.002, 1.003, 1.0085, 1.2]
    assert plots.levels(ratios) == [n * plots.LEVEL for n in (0, 1, -1, 2, 0, 0)]


def test_the_same_rows_draw_the_same_bytes(bench: Importer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = bench("page_plots")
    twice = [[path.read_bytes() for path in plots.draw_all(plots=tmp_path / name)] for name in ("a", "b")]
    assert twice[0] == twice[1] and not plots.stale(plots=tmp_path / "a")
    assert [what for _, what in plots.stale(plots=tmp_path)] == ["is missing"] * len(plots.DRAWN)


def test_no_row_lies_beyond_the_axis(bench: Importer) -> None:
    pytest.importorskip("matplotlib")
    figure, plots = importlib.import_module("matplotlib.figure").Figure(), bench("page_plots")
    axes, values = figure.add_subplot(), {"inference": list[Any](), "FP8 training": list[Any]()}
    values["FP8 training"] = [{"case": "a", "card": "H100", "gain": gain, "alone": True} for gain in (0.4, 2.5)]
    plots.draw_gains(axes, values)
    assert axes.get_xlim()[0] < 0.4 and axes.get_xlim()[1] > 2.5
