"""A measured figure stands on a page only where `bench/pages.py` makes it of bench/results, or where a command that
`docs/outputs.py` runs prints it. What is found elsewhere must be in KEPT, which says what it is instead."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from coda_inductor.codegen.legality import bucket
from coda_inductor.commands.differences import off
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import joint_pass, undefined
from coda_inductor.passes import blocks, elementwise
from coda_inductor.tuning import outcome

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "bench/README.md", "examples/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)  # fmt: skip
WHOLE = ("docs/models.md",)
"""Pages that are made as a whole (test_the_page_of_models_is_made_of_its_rows)."""

DIGITS = r"\d[\d,]*(?:\.\d+)?"
WORDS = r"\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|forty|fifty|a hundred)"
GAP = r"(?: |\n *)"
UNITS = (
    "%", "per cent", "percent", "ns", "us", "µs", "ms", "s", "seconds?", "milliseconds?", "minutes?", "hours?",
    "[KMG]i?B", "[GT]B/s", "TB", "[MG]Hz", "W", "mJ", "J", "[TP]?FLOPS?", "(?:tokens|images|samples)(?:/s| a second)",
)  # fmt: skip
UNIT = rf"(?:{'|'.join(UNITS)})(?![\w-])"
WITH_UNIT = re.compile(
    rf"(?<![\w.,]){DIGITS}(?:{GAP}?{UNIT}|{GAP}times\b|x(?!\w))|{WORDS}{GAP}(?:{UNIT}"
    rf"|times(?={GAP} *(?:as|more|less|faster|slower|longer|those|that|the|[A-Z])))"
)
DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+(?:e[+-]?\d+)?|e-\d+)(?![\w.]*\w)")
CELL = re.compile(r"(?<=\|) *\**\d[\d,]* *\**(?=\|)")
"""A cell of a table that is a number and nothing else."""

QUOTED = re.compile(r"<!-- output: coda-inductor [^\n]+ -->\n```[a-z]*\n.*?^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TARGET = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+")
CODE = re.compile(r"^```.*?^```$|^ {4}[^\n]*|`[^`\n]+`", re.DOTALL | re.MULTILINE)
VERSION = re.compile(
    r"\b(?:[Tt]orch|Python|CUDA|Triton|QuACK|torchao|Liger-Kernel|TransformerEngine|diffusers|peft|Stable\sDiffusion|until)"
    r"(?:\s+of)?\s+\d+(?:\.\d+)+(?:\s+(?:to|and)\s+\d+(?:\.\d+)+)?(?=\D|$)"
)


@dataclass(frozen=True)
class Kept:
    """A figure of a page that is no measurement: the words around it, what it is, and, where the code or arithmetic
    says the figure, these words made of that."""

    page: str
    words: str
    what: str
    made: Callable[[], str] | None = None


def percent(part: float) -> str:
    return f"{100 * part:g} %"


DDP = inspect.getsource(DistributedDataParallel)
F64 = torch.float64.itemsize


def bound(test: str, pattern: str) -> str:
    """What a test's source has where the pattern is."""
    found = re.search(pattern, (ROOT / "tests" / test).read_text())
    assert found, f"tests/{test} has nothing like {pattern}"
    return found[1]


KEPT = (
    Kept("docs/compile-time.md", "at least 2 % above ours", "a threshold",
         lambda: f"at least {percent(outcome.WIN - 1)} above ours"),
    Kept("docs/compile-time.md", "0.5 % is enough", "a threshold",
         lambda: f"{percent(outcome.LONG_WIN - 1)} is enough"),
    Kept("docs/compile-time.md", "at most 1 % above Inductor's", "a threshold",
         lambda: f"at most {percent(outcome.COSTS)} above Inductor's"),
    Kept("docs/compile-time.md", "wins by less than 15 %", "a threshold",
         lambda: f"wins by less than {percent(outcome.CLOSE - 1)}"),
    Kept("docs/compile-time.md", "`cache_limit` (10 GB)", "a default",
         lambda: f"`cache_limit` ({Settings().cache_limit} GB)"),
    Kept("docs/explain.md", "take 20 % of a\nstep and coverage is 50 %, a step can become at most 10 % shorter",
         "an example's arithmetic", lambda: f"take 20 % of a\nstep and coverage is 50 %, a step can become at most "
         f"{percent(0.2 * 0.5)} shorter"),
    Kept("docs/faq.md", "about 190 MB to download and 550 MB on disk", "the wheels of what pip brings, and unpacked"),
    Kept("docs/faq.md", "at its buckets, 25 MB", "torch's default",
         lambda: "at its buckets, " + re.findall(r"default size of (\d+) MiB", DDP)[0] + " MB"),
    Kept("docs/using.md", "at 25 MB by default", "torch's default, compared as faq.md's"),
    Kept("docs/fp8.md", "a tensor of 16.8 million numbers", "a threshold",
         lambda: f"a tensor of {elementwise.WORTH / 1e6:.1f} million numbers"),
    Kept("docs/numerics.md", "more than 1.5 times Inductor's error", "a threshold",
         lambda: f"more than {off.FACTOR} times Inductor's error"),
    Kept("docs/numerics.md", "is at most 1.5 times the distance", "a bound of a test",
         lambda: "is at most " + bound("whole/test_training_bf16.py", r'last\["coda"\] <= ([0-9.]+) \* last')
         + " times the distance"),
    Kept("docs/numerics.md", "1 % of integers may differ", "a threshold",
         lambda: f"{percent(off.LABELS)} of integers may differ"),
    Kept("docs/numerics.md", "ten times\n  Inductor's noise", "a threshold",
         lambda: f"{ {10.0: 'ten'}[off.NOISE]} times\n  Inductor's noise"),
    Kept("docs/numerics.md", "as 2e-5 of 300", "a rounding of float32",
         lambda: f"as {300 * 2**-24:.0e} of 300".replace("-0", "-")),
    Kept("docs/numerics.md", "a relative 3e-6", "a bound of a test",
         lambda: f"a relative {bound('codegen/test_generated.py', r'< (3e-6)')}"),
    Kept("docs/architecture.md", "a relative 3e-6", "a bound of a test, compared as that of numerics.md"),
    Kept("docs/numerics.md", "at most 1.05 times Inductor's on average", "a bound of a test",
         lambda: f"at most {bound('whole/test_float8.py', r'len.found. <= (1[.0-9]+)')} times Inductor's on average"),
    Kept("docs/numerics.md", "1.25 times for any tensor", "a bound of a test",
         lambda: f"{bound('whole/test_float8.py', r'max.found. <= (1[.0-9]+)')} times for any tensor"),
    Kept("docs/numerics.md", "8 bytes a number, four times those of bfloat16", "sizes of dtypes",
         lambda: f"{F64} bytes a number, { {4: 'four'}[F64 // torch.bfloat16.itemsize]} times those of bfloat16"),
    Kept("docs/numerics.md", "(64 MiB or more)", "a threshold", lambda: f"({undefined.LARGE >> 20} MiB or more)"),
    Kept("docs/numerics.md", "eight times as wide as the hidden state", "a threshold",
         lambda: f"{ {8: 'eight'}[blocks.AMPLIFIED]} times as wide as the hidden state"),
)  # fmt: skip
"""What is no measurement. Facts of the code are compared with it."""

SAID = (
    *(Kept(page, "fewer than 256 tokens", "joint_pass.py's SMALL", lambda: f"fewer than {joint_pass.SMALL} tokens")
      for page in ("README.md", "CHANGELOG.md", "docs/faq.md")),
    Kept("docs/compile-time.md", "at least 64, at most 32768", "legality.py's bucket",
         lambda: f"at least {bucket(1)}, at most {bucket(1 << 30)}"),
    Kept("docs/compile-time.md", "5000 and 8192 tokens are one class, 8193 is the next", "the same",
         lambda: f"5000 and {bucket(5000)} tokens are one class, {bucket(5000) + 1} is the next"),
    Kept("docs/benchmarks.md", "its default of 2048 rows", "a default",
         lambda: f"its default of {Settings().chunk} rows"),
)  # fmt: skip
"""What does not look like a measured figure, and is a fact of the code."""

COMPARED = {
    ("docs/numerics.md", "law", -2): "test_bounds_of_errors_are_those_of_the_tests",
    ("docs/options.md", "option", 3): "test_the_table_of_options_is_that_of_the_settings",
}
"""Columns of tables (by the page, the head of the first column, and which one it is) that a test of test_docs.py
compares with the code."""


def blank(found: re.Match[str]) -> str:
    """As many lines, without a word."""
    return "\n" * found[0].count("\n") or " "


def without_column(text: str, head: str, column: int) -> str:
    """The text, the cells of one column of one of its tables empty."""

    def emptied(found: re.Match[str]) -> str:
        rows = [row.split("|") for row in found[0].splitlines()]
        for row in rows:
            row[1:-1][column]  # the column is there
            row[column + 1 if column >= 0 else column - 1] = ""
        return "\n".join(map("|".join, rows)) + "\n"

    return re.sub(rf"^\| {head} \|(?:.*\n\|)+.*\n", emptied, text, count=1, flags=re.MULTILINE)


def outside(page: str, text: str, pages: ModuleType) -> str:
    """The page's text that nothing makes, without comments, addresses and what is known to be no measurement; of a page
    that bench/pages.py does not fill, what stands between markers, too."""
    made = (pages.MARKED, QUOTED) if ROOT / page in pages.pages() else ()
    for pattern in (*made, COMMENT, TARGET):
        text = pattern.sub(blank, text)
    for kept in (kept for kept in KEPT if kept.page == page):
        text = re.sub(re.escape(kept.words), blank, text)
    for name, head, column in COMPARED:
        text = without_column(text, head, column) if name == page else text
    return text


def figures(text: str) -> list[tuple[int, str]]:
    """(line, figure) of each measured figure of a text, or what looks like one: numbers with a unit; outside code also
    decimal numbers, and cells of tables that are numbers."""
    prose = VERSION.sub(blank, CODE.sub(blank, text))
    places = ((WITH_UNIT, text), (DECIMAL, WITH_UNIT.sub(blank, prose)), (CELL, prose))
    return sorted(
        (where.count("\n", 0, found.start()) + 1, " ".join(found[0].split()))
        for pattern, where in places
        for found in pattern.finditer(where)
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE])
def test_a_figure_is_made_of_rows(page: str, bench: Callable[[str], ModuleType]) -> None:
    text = outside(page, (ROOT / page).read_text(), bench("pages"))
    assert figures(text) == [], "neither made by bench/pages.py nor in KEPT"


@pytest.mark.parametrize("kept", (*KEPT, *SAID), ids=lambda kept: f"{kept.page}: {kept.words}".replace("\n", " "))
def test_what_is_no_measurement_is_what_the_code_says(kept: Kept) -> None:
    assert kept.words in (ROOT / kept.page).read_text(), "nothing says so any more: take it out of KEPT"
    assert figures(kept.words) or kept in SAID
    assert kept.made is None or kept.made() == kept.words


def test_columns_are_compared_elsewhere() -> None:
    tests = (ROOT / "tests" / "project" / "test_docs.py").read_text()
    for (page, head, column), test in COMPARED.items():
        text = (ROOT / page).read_text()
        assert f"def {test}(" in tests and without_column(text, head, column) != text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It gains 1.05x, by turns 0.9 %.", ["1.05x", "0.9 %"]),
        ("| a | 12 ms | 3.1 GiB | 1,024 MB |", ["12 ms", "3.1 GiB", "1,024 MB"]),
        ("60 to 70 s, 186 us, two minutes", ["70 s", "186 us", "two minutes"]),
        ("179,000 tokens/s and 2.8 TB/s at 690 W", ["179,000 tokens/s", "2.8 TB/s", "690 W"]),
        ("an error of 2e-3, or 3.82e-03", ["2e-3", "3.82e-03"]),
        ("1.5 times as long, ten times\nInductor's, 19\n% slower", ["1.5 times", "ten times", "19 %"]),
        ("The mean is 0.563.", ["0.563"]),
        ("| a | 57 | **0.98** | 1600 |", ["0.98", "57", "1600"]),
        ("    kernels took 12.5 s  # of 0.25", ["12.5 s"]),
        ("It ran three times with torch 2.11.0 of [this](a/1.5x.md), 2 x 2048 tokens, 16 bits, H100s, `rtol=0.1`", []),
    ],
)  # fmt: skip
def test_figures_are_found(text: str, found: list[str]) -> None:
    assert sorted(figure for _, figure in figures(TARGET.sub("", text))) == sorted(found)


def test_a_figure_that_is_planted_is_found(bench: Callable[[str], ModuleType]) -> None:
    """Beside a marker, a quotation and what is kept; inside of them it is the other tests that find it."""
    page, pages = "docs/compile-time.md", bench("pages")
    text = (ROOT / page).read_text()
    for planted in ("wins by 3 %", "costs at most 1.5 % more", "takes 12 s more", "| 12 |"):
        assert figures(outside(page, f"{text}\n{planted}\n", pages)), planted
    marked = "\n<!-- figure: losses -->1.2x<!-- end --> <!-- 3 ms -->\n"
    assert not figures(outside(page, text + marked, pages))
    assert figures(outside("CONTRIBUTING.md", marked, pages)) == [(2, "1.2x")]  # pages.py does not fill it


def test_the_page_of_models_is_made_of_its_rows(bench: Callable[[str], ModuleType]) -> None:
    rows = bench("page_rows").read("coverage.jsonl")
    assert bench("coverage_page").rendered(rows) == (ROOT / "docs" / "models.md").read_text()
