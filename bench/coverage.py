"""The coverage of every model of coverage_zoo.py, for inference and training, counted on its graphs without a GPU.

    python bench/coverage.py [NAME ...] [--out FILE.jsonl] [--rows FILE.jsonl] [--write docs/models.md]

Prints one JSON line for each model and mode, as `explain` counts them for sm_90a; `--out` rewrites its file with all of
them after each. A model that raises is a row with "error", one whose package is missing a row with "skipped". `--rows`
takes the rows of models that are not named from a file (without a name nothing is counted), and `--write` makes the
page with the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from coverage_cases import Case, build
from coverage_page import rendered
from coverage_zoo import MODELS

from coda_inductor.codegen import target
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240
MODES: tuple[Literal["infer", "train"], ...] = ("infer", "train")
PACKAGES = ("transformers", "diffusers", "timm", "peft")
TOTALS = ("coverage", "kernels_before", "kernels_after", "regions", "bytes_before", "bytes_after")

Row = dict[str, Any]


class TookTooLong(BaseException):
    """No Exception, which Dynamo would take for its own."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TookTooLong inside, after so many seconds."""

    def stop(*_: Any) -> None:
        raise TookTooLong(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def counted(case: Case, mode: Literal["infer", "train"]) -> Row:
    """What is counted of one model in one mode. "seconds" are those of tracing and deriving; "left" are the reasons why
    passes stay with Inductor, those of most bytes first."""
    model, args = build(case)
    start = time.perf_counter()
    facts = explain(model, args, {}, mode, Settings(target="sm_90a"))
    totals = facts["totals"]
    left: Counter[str] = Counter()
    for graph in facts["graphs"]:
        for kernel in graph["passes"]:
            left[kernel["why"]] += kernel["bytes"]
    return {
        **{name: totals[name] for name in TOTALS},
        "passes_left_per_layer": totals["passes_left"] / case.layers,
        "saved_bytes": totals["saved_bytes"],
        "saved_bytes_inductor": totals["saved_bytes_inductor"],
        "graphs": len(facts["graphs"]),
        "left": [{"why": why, "bytes": moved} for why, moved in left.most_common(3)],
        "seconds": round(time.perf_counter() - start, 1),
    }


def row_of(name: str, mode: Literal["infer", "train"], limit_s: int = LIMIT_S) -> Row:
    """One row, whatever happens in between."""
    case = MODELS[name]
    row: Row = {"model": name, "mode": mode, "family": case.family, "dense": case.dense}
    try:
        with at_most(limit_s):
            return row | counted(case, mode)
    except ModuleNotFoundError as why:
        return row | {"skipped": str(why).splitlines()[0]}
    except TookTooLong as why:
        return row | {"error": str(why)}
    except Exception as why:
        said = str(why).split("\n\n")[0]  # what Dynamo adds is advice
        return row | {"error": f"{type(why).__name__}: {' '.join(said.split())[:300]}"}


def versions() -> dict[str, str]:
    """Of torch, of Python, and of what the models are made by."""
    found = {"torch": target.versions()["torch"], "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def commit() -> str:
    """The commit that is counted at: "on the way from" it where the package or the table has changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "coda_inductor", *(str(p) for p in Path(__file__).parent.glob("*.py")))
    return "on the way from " * bool(changed) + (git("rev-parse", "--short=7", "HEAD") or "unknown")


def read(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def in_order(rows: Mapping[tuple[str, str], Row]) -> list[Row]:
    """In the order of the models."""
    return [rows[name, mode] for name in MODELS for mode in MODES if (name, mode) in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts, prints a line for each model and mode, and writes what it is asked to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" or ".join(MODELS))
    parser.add_argument("--out", metavar="FILE.jsonl", help="where the rows go; what was there is gone")
    parser.add_argument("--rows", metavar="FILE.jsonl", help="rows that were counted before")
    parser.add_argument("--write", metavar="FILE.md", help="where the table goes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    rows = {(row["model"], row["mode"]): row for row in read(options.rows)} if options.rows else {}
    names = options.names or ([] if options.rows else list(MODELS))
    made_by = {
        "versions": versions(), "command": " ".join(["python", "bench/coverage.py", *names[: len(options.names)]]),
        "commit": commit(),
    }  # fmt: skip
    for name in names:
        for mode in MODES:
            rows[name, mode] = row = row_of(name, mode) | made_by
            print(json.dumps(row), flush=True)
            if options.out:
                Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in in_order(rows)))
            gc.collect()
    if options.write:
        Path(options.write).write_text(rendered(in_order(rows)))


if __name__ == "__main__":
    main()
