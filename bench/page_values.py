"""What the plots show, the classes of gains, and single figures that pages name: made of the rows of bench/results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import page_names as names
from page_rows import RESULTS, Row, at, loses, read, shown, written_gain, written_ms
from page_tables import (
    BENCH,
    BESIDE,
    DEFAULT,
    DISTRIBUTED,
    EXAMPLES,
    FLOAT8_INFERENCE,
    FLOAT8_STEP,
    FLOAT8_TRAINING,
    HEADS,
    INFERENCE,
    MODELS,
    NANO,
    PROFILED,
    RELU,
    STEPS,
    TRAINING,
    UNTUNED,
)

WHOLE = (
    INFERENCE, MODELS, TRAINING, RELU, NANO, STEPS, FLOAT8_STEP, FLOAT8_TRAINING, FLOAT8_INFERENCE, BENCH, EXAMPLES,
)  # fmt: skip
"""Where peaks of models are."""
COUNTED = (*WHOLE, DISTRIBUTED, HEADS, UNTUNED, BESIDE)
"""Where gains are."""

CHANGE = 0.02
"""How much of a peak a case must save or add to be in the plot of memory."""

WIDTHS = (2048, 4096, 8192)
BY_WIDTH = {"layer": "layer", "rotary": "layer with rotary embeddings"}

Values = dict[str, Any]
Case = tuple[str, str, str]

CLASS_OF: dict[Case, str] = {
    (file, kind, case): name
    for name, places in names.CLASSES.items()
    for (file, kind), cases in places.items()
    for case in cases
}


def gained(results: Path = RESULTS) -> Iterator[tuple[Case, Row, float, bool]]:
    """(case, row, gain, whether each side was alone) of every row with a gain over torch.compile's default mode; the
    gain is that of each side alone where it is known."""
    for row in (row for source in COUNTED for row in shown(source, results)):
        alone, turns = at(row, "alone/gain"), at(row, "turns/gain")
        gain = turns if alone is None else alone
        if gain is not None and row.get("baseline", DEFAULT) == DEFAULT:
            yield (row["file"], row["kind"], row["case"]), row, gain, alone is not None


def gains(results: Path = RESULTS) -> Values:
    """{class: [{"case", "card", "gain", "alone"}, ...]}: torch.compile's time over ours, default mode."""
    found: Values = {name: [] for name in names.CLASSES}
    for case, row, gain, alone in gained(results):
        if name := CLASS_OF.get(case):
            point = {"case": labelled(row), "card": row["card"], "gain": round(gain, 3), "alone": alone}
            found[name].append(point)
    return found


def labelled(row: Row) -> str:
    """What a row is called in a plot."""
    name = str(row["what"]).replace("`", "")
    if row["file"] == "float8.jsonl" and "d" in row:
        name = f"Llama, width {row['d']}, {name}"
    return f"{name}, forward" if row["kind"] == "forward" else name


def classes(page: Path, results: Path = RESULTS) -> str:
    """The table of classes as Markdown: gains of each side alone, then of rows that were timed by turns only."""
    lines = ["| | rows | least | median | greatest | by turns only |", "| --- | --- | --- | --- | --- | --- |"]
    for name, points in gains(results).items():
        alone = [point["gain"] for point in points if point["alone"]]
        turns = [point["gain"] for point in points if not point["alone"]]
        ends = [written_gain(pick(alone)) for pick in (min, median, max)] if alone else ["", "", ""]
        if points:
            lines.append(f"| {' | '.join([name, str(len(alone)), *ends, written_range(turns)])} |")
    return "\n".join(lines)


def written_range(ratios: list[float]) -> str:
    """ "1.006x (1)" or "1.055x to 1.177x (6)"."""
    ends = [written_gain(ratio) for ratio in (min(ratios), max(ratios))] if ratios else []
    said = " to ".join(dict.fromkeys(ends))
    return f"{said} ({len(ratios)})" if ratios else ""


def memory(results: Path = RESULTS) -> Values:
    """{"rows": [{"case", "card", "before", "after"}, ...]}: peaks in GiB, the greatest part saved first. What changes
    by less than CHANGE is left out, and forwards of training are."""
    rows = []
    for row in (row for source in WHOLE for row in shown(source, results)):
        before, after = row["memory"]["before"], row["memory"]["after"]
        if before and after and row["kind"] != "forward" and abs(after / before - 1) >= CHANGE:
            point = {"case": labelled(row), "card": row["card"]}
            rows.append(point | {"before": round(before, 3), "after": round(after, 3)})
    return {"rows": sorted(rows, key=lambda row: row["after"] / row["before"])}


def width(results: Path = RESULTS) -> Values:
    """{"layer, training": [[width, gain alone], ...], ...} of the layers in training."""
    rows = {(row["case"], row["kind"]): row for row in shown(TRAINING, results)}
    found: Values = {}
    for name, called in BY_WIDTH.items():
        for kind, how in (("forward", "forward"), ("training", "forward and backward")):
            pairs = [(d, rows.get((f"{name}-{d}", kind))) for d in WIDTHS]
            found[f"{called}, {how}"] = [
                [d, round(gain, 3)] for d, row in pairs if row is not None and (gain := at(row, "alone/gain"))
            ]
    return found


def figures(results: Path = RESULTS) -> dict[str, str]:
    """Single figures that sentences of the pages have, by their names; those whose rows are missing are not there."""
    found = {}
    for name, points in gains(results).items():
        if alone := [point["gain"] for point in points if point["alone"]]:
            found[f"median of {name}"] = f"{median(alone):.2f}x"
    every = [point["gain"] for points in gains(results).values() for point in points]
    found["torch"] = " and ".join(sorted({row["torch"] for _, row, _, _ in gained(results)}))
    found["losses"] = f"{sum(map(loses, every))} of {len(every)} rows"
    for row in shown(FLOAT8_STEP, results):
        found["the bf16 step of FP8"] = f"{written_ms(at(row, 'rows/inductor, bf16/ms'))} ms"
        found["the FP8 step over bf16"] = written_gain(at(row, "against_bf16"))
    of_llama = [row for row in read("models.jsonl", results) if row["case"] == names.LLAMA]
    for row in of_llama:
        if row.get("attention") == "masks stay":
            found["Llama-1B with its masks"] = written_gain(at(row, "speedup"))
        if row.get("attention") == "no masks":
            found["Llama-1B without its masks"] = written_gain(at(row, "speedup"))
    for row in read("peers.jsonl", results):
        if row["case"] == "llama-8b" and (ours := at(row, "sides/float8-coda/ms")):
            for side, said in (("inductor", "over bf16"), ("coda", "over ours in bf16")):
                found[f"8B layers in FP8 {said}"] = f"{row['sides'][side]['ms'] / ours:.2f}x"
    for row in shown(PROFILED, results):
        kinds = {backend: row[backend]["by_kind"] for backend in ("inductor", "coda")}
        before, after = kinds["inductor"], kinds["coda"]
        products = written_ms(after["gemm"] + after["ours"])
        found["FSDP2 memory-bound"] = f"from {written_ms(before['triton'])} ms to {written_ms(after['triton'])} ms"
        found["FSDP2 products"] = f"{products} ms where products took {written_ms(before['gemm'])} ms"
    for row in read("coverage.jsonl", results):
        if (row["model"], row["mode"]) == ("flux_1_dev", "infer"):
            found["coverage of Flux"] = f"{100 * row['coverage']:.0f} %"
            found["bytes of Flux"] = f"{100 * (1 - row['bytes_after'] / row['bytes_before']):.0f} %"
    return found
