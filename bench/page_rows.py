"""Rows of bench/results as Markdown tables: which row is shown for a case, and how a cell is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

KINDS = {"infer": "inference", "forward": "forward", "train": "training"}
"""What the rows' "mode" is called."""

FP8 = re.compile("fp8|float8", re.IGNORECASE)
CARD = re.compile(r"(?:(\d+) x )?NVIDIA (\w+).*?(?:, (\d+) of one host)?")


RUNS = 5
"""How many measurements of a case, the last ones, say how far they lie apart."""


@dataclass(frozen=True)
class Source:
    """Rows of one file: those for which `where` holds, and of these the last for each `key`.

    The paths say where a row has its milliseconds and GiB, those of torch.compile first; "|" stands between
    alternatives and "/" before a key within. `alone` is true where a row's own milliseconds are of each side repeated
    alone. `spread` names keys whose values become keys of one row: ("backend", "cache") gives row["coda"]["cold"].
    `how` says how rows were timed that are neither of each side alone nor by turns.
    """

    file: str
    where: Callable[[Row], bool] = lambda row: True
    key: tuple[str, ...] = ("case", "mode", "machine", "baseline")
    names: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    spread: tuple[str, ...] = ()
    how: str = ""
    numbers: str = "bf16"
    kind: str = ""
    baseline_ms: str = "baseline_ms"
    ms: str = "ms"
    baseline_gib: str = "gib/inductor|gib/baseline|baseline_gib"
    gib: str = "gib/coda|gib/ours|gib"


@dataclass(frozen=True)
class Column:
    """A column: its head, the paths of its value, and how the value is written (a name of `SPELLINGS`)."""

    head: str
    paths: str
    spelling: str = "text"


@dataclass(frozen=True)
class Table:
    """A table: what makes its rows again, where they are, and what is shown of each. Cases with fewer than
    `least_runs` measurements, each side alone, are left out. A `brief` one has only cards and torch below it."""

    name: str
    made: str
    sources: tuple[Source, ...]
    columns: tuple[Column, ...]
    least_runs: int = 0
    brief: bool = False


def read(file: str, results: Path = RESULTS) -> list[Row]:
    """The rows of a file, none where there is no such file yet."""
    path = results / file
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def at(row: Any, paths: str) -> Any:
    """What stands at the first of the paths that leads to a number, a list of numbers (its median) or a text."""
    for path in paths.split("|"):
        found = row
        for step in path.split("/"):
            if isinstance(found, list) and step.isdigit():
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, list) and found and all(isinstance(x, int | float) for x in found):
            return median(found)
        if isinstance(found, int | float | str) and not isinstance(found, bool):
            return found
    return None


def shown(source: Source, results: Path = RESULTS) -> list[Row]:
    """The rows of a source that are shown, with their `facts`: by the order of its names, then of the file."""
    found = dict[tuple[str, ...], list[Row]]()
    for row in read(source.file, results):
        if source.where(row):
            key = tuple(str(at(row, name)) for name in source.key)
            found[key] = [*found.pop(key, []), facts(row, source)]  # the order is that of the last measurements
    rows = [same[-1] | {"runs": runs(same)} for same in found.values()]
    if source.spread:
        rows = [facts(row, source) for row in spread(rows, source.spread)]
    order = {case: i for i, case in enumerate(source.names)}
    return sorted(rows, key=lambda row: order.get(row["case"], len(order)))


def facts(row: Row, source: Source) -> Row:
    """The row, with what every file names in a way of its own under one name."""
    ms, baseline, again = at(row, source.ms), at(row, source.baseline_ms), at(row, "again_ms|ms/null|sides/again/ms")
    turns, held = {"ms": ms, "baseline_ms": baseline}, row.get("sustained") or {}
    if source.alone and not held:
        turns, held = {}, turns
    by_turns, alone = with_gain(turns), with_gain(held)
    return row | {
        "file": source.file,
        "what": source.names.get(row["case"], row["case"]),
        "kind": source.kind or KINDS.get(row.get("mode", ""), ""),
        "numbers": "FP8" if FP8.search(row["case"]) else source.numbers,
        "card": card(row),
        "torch": str(at(row, "versions/torch|torch")).split("+")[0],
        "turns": by_turns, "alone": alone,
        "how": source.how or ("alone" if alone["gain"] else "by turns" if by_turns["gain"] else ""),
        "null": baseline / again if baseline and again else row.get("null"),
        "memory": {"before": at(row, source.baseline_gib), "after": at(row, source.gib)},
    }  # fmt: skip


def card(row: Row) -> str:
    """ "H100", or "2 x H100" where a row is of several."""
    machine = str(at(row, "machine|gpu"))
    if not (found := CARD.fullmatch(machine)):
        return machine
    count = int(found[1] or found[3] or row.get("ranks") or 1)
    return f"{count} x {found[2]}" if count > 1 else found[2]


def runs(rows: Sequence[Row]) -> Row:
    """Of the last RUNS measurements of a case, each side alone: how many, the least gain and the greatest."""
    held = [gain for row in rows if (gain := at(row, "alone/gain")) is not None][-RUNS:]
    return {"count": len(held), "least": min(held, default=None), "greatest": max(held, default=None)}


def with_gain(times: Mapping[str, Any]) -> Row:
    """The two times, and how many times as long torch.compile takes."""
    ms, baseline = times.get("ms"), times.get("baseline_ms")
    return {"ms": ms, "baseline_ms": baseline, "gain": baseline / ms if ms and baseline else None}


def spread(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """One row for a case, mode and machine, which has the rows under the values that `names` have in them."""
    found = dict[tuple[str, ...], Row]()
    for row in rows:
        merged = found.setdefault((row["case"], row.get("mode", ""), row["card"]), dict(row))
        for name in names[:-1]:
            merged = merged.setdefault(row[name], {})
        merged[row[names[-1]]] = row
    return list(found.values())


def loses(gain: float) -> bool:
    """Whether a gain is a loss, as it is written."""
    return float(f"{gain:.3f}") < 1


def written_ms(ms: float) -> str:
    return f"{ms:.{3 if ms < 10 else 2 if ms < 100 else 1}f}"


def written_gain(gain: float, null: float | None = None) -> str:
    """A loss is bold; what lies as near to 1 as two compiles of torch.compile's lie to each other is in italics."""
    text = f"**{gain:.3f}x**" if loses(gain) else f"{gain:.3f}x"
    return text if null is None or round(abs(gain - 1), 3) > round(abs(null - 1), 3) else f"*{text}*"


def written_memory(memory: Mapping[str, float | None]) -> str:
    """Before and after, in GiB; what is more than before is bold."""
    before, after = (None if memory.get(k) is None else f"{memory[k]:.2f}" for k in ("before", "after"))
    if before is None or after is None:
        return after or before or ""
    return f"{before} → **{after}**" if float(after) > float(before) else f"{before} → {after}"


SPELLINGS: dict[str, Callable[[Any], str]] = {
    "text": str, "ms": written_ms, "gain": written_gain, "memory": written_memory,
    "ratio": lambda ratio: f"{ratio:.3f}x",
    "loss": lambda loss: f"{loss:.3f}", "s": lambda s: f"{s:.1f}",
    "gib": lambda gib: f"{gib:.2f}", "error": lambda error: f"{error:.2e}",
}  # fmt: skip


def cell(row: Row, column: Column) -> str:
    """A cell, empty where the row has no such value."""
    value = row.get(column.paths) if column.spelling == "memory" else at(row, column.paths)
    if value is None:
        return ""
    if column.spelling == "gain":
        return written_gain(value, row["null"])
    return SPELLINGS[column.spelling](value).replace("|", "/")


def rendered(table: Table, page: Path, results: Path = RESULTS) -> str:
    """The table as Markdown, for a page at this path: head, rows, and below them card, torch, command and files."""
    rows = [row for source in table.sources for row in shown(source, results)]
    rows = [row for row in rows if row["runs"]["count"] >= table.least_runs]
    if not rows:
        return f"No rows yet. {table.made} makes them."
    columns = list(table.columns)
    here = {column.paths for column in columns}
    for head, path in (("card", "card"), ("torch", "torch")):  # where they differ
        if len({row[path] for row in rows}) > 1 and path not in here:
            columns.insert(1, Column(head, path))
    lines = [[column.head for column in columns], ["---"] * len(columns)]
    lines += [[cell(row, column) for column in columns] for row in rows]
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in lines), "", foot(table, rows, os.path.relpath(results, page.parent))]
    )


def foot(table: Table, rows: Sequence[Row], place: str) -> str:
    """Where the rows were measured, what makes them, and in which files of the folder `place` they are."""
    cards, torches = (" and ".join(sorted({row[name] for row in rows})) for name in ("card", "torch"))
    links = ", ".join(f"[{file}]({place}/{file})" for file in dict.fromkeys(row["file"] for row in rows))
    where = f"{cards}, torch {torches}."
    return where if table.brief else f"{where} Made by {table.made}. Rows, with all versions: {links}."
