"""What the plots show, and the ranges that pages name: values made of the rows of bench/results."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from page_rows import RESULTS, Row, at, shown
from page_tables import (
    BENCH,
    DEFAULT,
    FLOAT8_INFERENCE,
    FLOAT8_STEP,
    FLOAT8_TRAINING,
    INFERENCE,
    MODELS,
    NANO,
    RELU,
    STEPS,
    TRAINING,
)

GROUPS = ("inference bf16", "inference FP8", "training bf16", "training FP8")
PLOTTED = (INFERENCE, MODELS, TRAINING, RELU, NANO, STEPS, FLOAT8_STEP, FLOAT8_TRAINING, FLOAT8_INFERENCE, BENCH)
"""Where the gains of each side alone are; a forward of a layer in training counts as training's."""

CHANGE = 0.02
"""How much of a peak a case must save or add to be in the plot of memory."""

WIDTHS = (2048, 4096, 8192)
BY_WIDTH = {"layer": "layer", "rotary": "layer with rotary embeddings"}

Values = dict[str, Any]


def gains(results: Path = RESULTS) -> Values:
    """{group: [{"case", "card", "gain"}, ...]}: torch.compile's time over ours, each side alone, default mode."""
    found: Values = {group: [] for group in GROUPS}
    for row in (row for source in PLOTTED for row in shown(source, results)):
        gain, baseline = at(row, "alone/gain"), row.get("baseline", DEFAULT)
        if gain is not None and baseline == DEFAULT:
            group = f"{'inference' if row['kind'] == 'inference' else 'training'} {row['numbers']}"
            found[group].append({"case": labelled(row), "card": row["card"], "gain": round(gain, 3)})
    return found


def labelled(row: Row) -> str:
    """What a row is called in a plot."""
    name = str(row["what"]).replace("`", "")
    if row["file"] == "float8.jsonl" and "d" in row:
        name = f"Llama, width {row['d']}, {name}"
    return f"{name}, forward" if row["kind"] == "forward" else name


def memory(results: Path = RESULTS) -> Values:
    """{"rows": [{"case", "card", "before", "after"}, ...]}: peaks in GiB, the greatest part saved first. What changes
    by less than CHANGE is left out, and forwards of training are."""
    rows = []
    for row in (row for source in PLOTTED for row in shown(source, results)):
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


def ranges(results: Path = RESULTS) -> dict[str, str]:
    """For each group of gains the smallest, the greatest and the median, as text."""
    found = {}
    for group, points in gains(results).items():
        if ratios := [point["gain"] for point in points]:
            ends = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
            count = f"{len(ratios)} row{'s' * (len(ratios) > 1)}"
            found[group] = f"{ends} (median {median(ratios):.2f}x, {count})"
    return found
