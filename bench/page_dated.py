"""Dated tables: what rows of bench/results said at a commit. Rows of later commits change nothing.

A cell names a file, a commit and what else a row must have. All rows of which that is true are shown, so that no run of
several is picked out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from page_rows import RESULTS, SPELLINGS, Row, at, card, read

Facts = tuple[tuple[str, Any], ...]

WRITTEN: dict[str, Callable[[Any], str]] = SPELLINGS | {
    "us of ms": lambda ms: f"{1000 * ms:.1f}",
    "ms of us": lambda us: SPELLINGS["ms"](us / 1000),
    "us": lambda us: f"{us:.1f}",
    "share": lambda share: f"{100 * share:.0f} %",
    "whole": lambda number: f"{number:.0f}",
    "whole us of ms": lambda ms: f"{1000 * ms:.0f}",
}


class NoRow(LookupError):
    """A cell of the log names a row that bench/results does not have."""


@cache
def known(file: str, results: Path, *changed: int) -> list[Row]:
    """The rows of a file, read once for as long as it does not change."""
    return read(file, results)


def changed(path: Path) -> tuple[int, ...]:
    """When a file was last written, and its size; nothing where there is none."""
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else ()


@dataclass(frozen=True)
class Cell:
    """The values at a path of all rows of a file that have a commit (or begin with it) and these facts."""

    file: str
    commit: str
    facts: Facts
    path: str
    spelling: str

    def rows(self, results: Path) -> list[Row]:
        """The rows. Raises NoRow if there is none with such a value."""
        found = [
            row
            for row in known(self.file, results, *changed(results / self.file))
            if row.get("commit", "").startswith(self.commit)
            and all(row.get(k) == v for k, v in self.facts)
            and at(row, self.path) is not None
        ]
        if not found:
            raise NoRow(f"{self.file} has no row of {self.commit} with {self.path} and {dict(self.facts)}")
        return found

    def written(self, results: Path) -> str:
        """ "1.094x", or "1.094x, 1.099x and 1.082x"."""
        values = [WRITTEN[self.spelling](at(row, self.path)) for row in self.rows(results)]
        return " and ".join([*([", ".join(values[:-1])] if values[1:] else []), values[-1]])


Line = tuple[str | Cell, ...]


@dataclass(frozen=True)
class Dated:
    """A table: its heads, and for each line labels and cells."""

    heads: tuple[str, ...]
    lines: tuple[Line, ...]

    def cells(self) -> Iterator[Cell]:
        """Those that are no label."""
        return (cell for line in self.lines for cell in line if isinstance(cell, Cell))

    def rendered(self, page: Path, results: Path = RESULTS) -> str:
        """The table as Markdown, and below it card, torch and files."""
        lines = [self.heads, ("---",) * len(self.heads)]
        lines += [tuple(x if isinstance(x, str) else x.written(results) for x in line) for line in self.lines]
        rows = [row for cell in self.cells() for row in cell.rows(results)]
        cards = " and ".join(sorted({card(row) for row in rows}))
        torches = " and ".join(sorted({str(at(row, "versions/torch|torch")).split("+")[0] for row in rows}))
        place = os.path.relpath(results, page.parent)
        files = ", ".join(f"[{file}]({place}/{file})" for file in dict.fromkeys(cell.file for cell in self.cells()))
        return "\n".join(
            [*(f"| {' | '.join(line)} |" for line in lines), "", f"{cards}, torch {torches}. Rows: {files}."]
        )


def cells(file: str, commit: str, paths: str, spelling: str, **facts: Any) -> Line:
    """A cell for each of the paths, which "; " separates."""
    return tuple(Cell(file, commit, tuple(facts.items()), path, spelling) for path in paths.split("; "))
