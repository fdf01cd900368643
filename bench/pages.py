"""Fills the tables and figures of README.md and docs/*.md from bench/results, and draws docs/plots.

    python bench/pages.py [--check] [--no-plots]

What stands between `<!-- table: NAME -->` and `<!-- end -->` becomes the table NAME of page_tables.py, or "classes",
the table of gains by class. "log NAME" is the dated table NAME of page_log.py. What stands between
`<!-- figure: NAME -->` and `<!-- end -->`, on one line, becomes the figure of that name of page_values.py. The plots
are those of page_plots.py; drawing needs matplotlib. `--check` writes nothing: it prints what would differ, and exits
with 1 if anything does. Of a plot it compares the values that are kept in the file.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import page_plots
import page_values
from page_log import DATED
from page_rows import RESULTS, ROOT, rendered
from page_tables import TABLES

MARKED = re.compile(r"<!-- (table|figure): ([\w -]+?) -->(.*?)<!-- end -->", re.DOTALL)
OPENED = re.compile(r"<!-- (?:table|figure): .*?-->")


class WrongMarker(Exception):
    """A page has a marker that names nothing, or that does not end."""


def filled(text: str, page: Path, results: Path = RESULTS) -> str:
    """The page's text, with every table and figure made from the rows. Raises WrongMarker."""
    tables = {table.name: partial(rendered, table) for table in TABLES} | {"classes": page_values.classes}
    tables |= {f"log {name}": table.rendered for name, table in DATED.items()}
    figures = page_values.figures(results)

    def replaced(match: re.Match[str]) -> str:
        kind, name, inside = match.groups()
        known = tables if kind == "table" else figures
        if name not in known:
            raise WrongMarker(f"{page.name}: no {kind} is called {name!r}; there are {', '.join(known)}")
        if OPENED.search(inside):
            raise WrongMarker(f"{page.name}: the {kind} {name!r} has no <!-- end --> before the next marker")
        made = f"\n{tables[name](page, results)}\n" if kind == "table" else figures[name]
        return f"<!-- {kind}: {name} -->{made}<!-- end -->"

    done = MARKED.sub(replaced, text)
    if len(OPENED.findall(done)) != len(MARKED.findall(done)):
        raise WrongMarker(f"{page.name}: a marker has no <!-- end -->, or a name that cannot be one")
    return done


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may have tables."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def stale(root: Path = ROOT, results: Path = RESULTS) -> Iterator[tuple[Path, str, str]]:
    """(page, its text, what it should be) for each page that is out of date."""
    for page in pages(root):
        text = page.read_text()
        if (wanted := filled(text, page, results)) != text:
            yield page, text, wanted


def main(argv: list[str] | None = None, root: Path = ROOT, results: Path = RESULTS) -> int:
    """Fills and draws, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--no-plots", action="store_true", help="tables and figures only")
    args = parser.parse_args(argv)
    plots = root / "docs" / "plots"
    old, old_plots = list(stale(root, results)), [] if args.no_plots else page_plots.stale(results, plots)
    if args.check:
        for page, text, wanted in old:
            name = str(page.relative_to(root))
            sys.stdout.writelines(
                difflib.unified_diff(text.splitlines(True), wanted.splitlines(True), name, f"{name}, from the rows")
            )
        for path, what in old_plots:
            print(f"{path.relative_to(root)}: {what}")
        if old or old_plots:
            print("out of date; `python bench/pages.py` makes them again")
        return int(bool(old or old_plots))
    for page, _, wanted in old:
        page.write_text(wanted)
        print(f"wrote {page.relative_to(root)}")
    if not args.no_plots and find_spec("matplotlib") is None:
        print("the plots were left: matplotlib draws them (pip install '.[bench]')")
        return int(bool(old_plots))
    if not args.no_plots:
        for path in page_plots.draw_all(results, plots):
            print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
