"""The pages: what they quote is printed, where they point is something, and their tables name what there is."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from evaluate import strict_reference
from torch import nn

from coda_inductor.codegen import target
from coda_inductor.core.errors import QUIETLY, Unsupported
from coda_inductor.core.settings import KINDS, VARIABLES, Settings
from coda_inductor.explain.listing import render
from coda_inductor.explain.steps import program
from coda_inductor.inductor import joint
from coda_inductor.passes.switches import NAMES, laws_of
from coda_inductor.rewrite.laws import LAWS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS, ROOT / "bench" / "README.md", ROOT / "CONTRIBUTING.md"]
WORDS = 1300
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/outputs.py, and docs/norm.py of this repository for the commands that it runs."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("docs", "docs.norm", "docs.outputs"):
        sys.modules.pop(name, None)
    return importlib.import_module("docs.outputs")


def prose(text: str) -> str:
    """A page without its blocks of code and comments."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: lower case, spaces as hyphens, without other signs."""
    heads = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("", head).lower()).replace(" ", "-") for head in heads}


def cells(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its first two lines."""
    table = page.read_text().split(f"{heading}\n", 1)[1].split("\n\n|", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.split("|")] for row in ROW.findall("|" + table)][2:]


def test_readme_is_short() -> None:
    """Words are what has a letter or a digit; comments are not read."""
    text = re.sub(r"<!--.*?-->", "", README.read_text())
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= WORDS


@each_page
def test_links_point_at_something(page: Path) -> None:
    """Files and headings of this repository; other addresses are not asked."""
    for link in LINK.findall(prose(page.read_text())):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_relative_to(ROOT), link
        assert file.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(file), f"{link}: no such heading; there are {sorted(anchors(file))}"


def test_every_page_is_linked_from_the_first() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(README.read_text())}
    assert not {str(page.relative_to(ROOT)) for page in DOCS} - linked


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda p: p.name)
def test_outputs_that_are_quoted(page: Path, outputs: ModuleType) -> None:
    assert list(outputs.stale(page.read_text())) == []


def test_outputs_are_looked_for(outputs: ModuleType) -> None:
    """A quotation that is wrong is found, and mended. Of errors the words count."""
    text = README.read_text()
    assert len(outputs.QUOTED.findall(text)) == text.count("<!-- output:") == 1
    for name, count in {"explain": 2, "numerics": 1, "architecture": 1}.items():
        assert len(outputs.QUOTED.findall((ROOT / "docs" / f"{name}.md").read_text())) == count
    wrong = text.replace("[4096, 2816]", "[4096, 2817]", 1)
    assert len(list(outputs.stale(wrong))) == 1 and outputs.written(wrong) == text
    (errors,) = outputs.QUOTED.finditer((ROOT / "docs" / "numerics.md").read_text())
    block = errors["block"]
    assert outputs.right(errors, block.replace("0.8", "0.9").replace("e-03", "e-04")) and "gradient of" in block
    assert not outputs.right(errors, block.replace("gradient of gate", "gradient of up"))


def test_the_picture_counts_as_the_commands_do(outputs: ModuleType) -> None:
    alone, ours = (outputs.printed(f"graph docs.norm:build{flag}") for flag in (" --before", ""))
    assert "4 products in 4 kernels" in alone and "3 memory-bound passes" in alone
    assert "in 3 kernels" in ours and "0 memory-bound passes" in ours
    assert '"torch.compile alone: 4 products, 3 passes over memory"' in README.read_text()
    assert '"backend=coda: 3 kernels, no pass"' in README.read_text()


@pytest.mark.usefixtures("uncached")
def test_the_lines_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """README's code runs as it stands; its gradients are eager's."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()
    inputs = torch.randn(24, 16, dtype=torch.float64)
    wanted = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    with strict_reference(run=False):
        exec(code, {"model": model, "inputs": inputs})
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-10)


def test_the_example_of_a_build(outputs: ModuleType) -> None:
    """docs/explain.md's function is one that explain takes."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "explain.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    explained = importlib.import_module("coda_inductor.explain").explain(
        *names["build"](), {}, "infer", Settings(target="sm_90a")
    )
    assert explained["totals"]["regions"] == 2


def test_the_table_of_options_is_that_of_the_settings() -> None:
    rows = cells(ROOT / "docs" / "options.md", "# Options")
    variables = {name: variable for variable, name in VARIABLES.items()}
    assert {row[0].strip("`") for row in rows} == KINDS.keys()
    for name, variable, values, default, meaning in rows:
        name = name.strip("`")
        assert variable == f"`{variables[name]}`" and values == KINDS[name].allowed and len(meaning) > 5, name
        value = getattr(Settings(), name)
        said = {True: "1", False: "0", None: "", frozenset(): ""}.get(value, str(value))
        assert default == ("`~/.cache/coda_inductor`" if name == "cache_dir" else said), name


def test_the_table_of_names_is_what_may_be_switched() -> None:
    rows = cells(ROOT / "docs" / "options.md", "## Names")
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(NAMES)


def test_the_tables_of_laws_name_them_all() -> None:
    laws = [law.name for law in LAWS]
    assert [row[0] for row in cells(README, "## How it works")] == laws
    told = {name for row in cells(ROOT / "docs" / "numerics.md", "## `default`") for name in row[0].split(", ")}
    assert told == {*laws, "autocast", "float32"}
    assert laws_of(Settings(numerics="strict")) == frozenset()  # "uses no law"


def test_bounds_of_errors_are_those_of_the_tests() -> None:
    rows = cells(ROOT / "docs" / "numerics.md", "## `default`")
    for *_, bound, held in rows:
        factor, file = bound.split()[0], (ROOT / held.strip("`")).read_text()
        assert re.search(rf"<=? {factor} \*|WORSE = {factor} ", file), (factor, held)


def test_the_lines_about_another_card() -> None:
    """Of doctor, and of the warning."""
    with pytest.raises(Unsupported) as error:
        target.available((10, 0))
    page = (ROOT / "docs" / "faq.md").read_text()
    assert f"    kernels   no: {error.value.said}\n" in page
    with pytest.raises(Unsupported) as error:
        target.available((8, 0))
    assert f"    coda_inductor: every graph is left to Inductor: {error.value.what} ({QUIETLY})\n" in page


def test_reasons_are_said_somewhere() -> None:
    """Each reason of docs/explain.md is in a message of ours."""
    sources = "".join(path.read_text() for path in sorted((ROOT / "coda_inductor").rglob("*.py")))
    plain = re.sub(r'"\s*\n\s*f?"', "", sources)
    for row in cells(ROOT / "docs" / "explain.md", "## Reasons, and what you can do"):
        assert row[0].strip("`") in plain, row[0]


def test_every_script_and_file_of_results_has_a_line() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    names = [p.name for p in (*(ROOT / "bench").glob("*.py"), *(ROOT / "bench" / "results").glob("*.jsonl"))]
    assert len(names) > 30 and not [name for name in names if f"`{name}`" not in text]


def test_findings_have_the_dates_of_their_commits() -> None:
    """Of each section that names some the first and the last, where git knows them."""
    text = (ROOT / "docs" / "log.md").read_text()
    sections = re.findall(r"^## (.*?): .*?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    named = 0
    for said, body in sections:
        if not (commits := set(re.findall(r"\b(?=\w*\d)[0-9a-f]{7}\b", body))):
            continue  # git would show the last commit of all
        named += 1
        shown = subprocess.run(
            ["git", "show", "--no-patch", "--format=%ad", "--date=short", *commits],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if shown.returncode:
            pytest.skip("no history here")
        days = sorted(shown.stdout.split())
        assert said == (days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1][5:]}"), body[:80]
    assert named > 15


@each_page
def test_commits_stand_in_the_log_alone(page: Path) -> None:
    if page.name in ("log.md", "models.md"):  # the latter is written by bench/coverage.py, and names its own
        return
    assert not re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7}\b", page.read_text())


def quoted(start: str) -> list[str]:
    """The lines of the text's indented block that begins so, without their indents."""
    block = TEXT[TEXT.index(f"    {start}") :].split("\n\n")[0]
    return [line.strip() for line in dedent(block).splitlines()]


@pytest.mark.parametrize(
    ("start", "mode"), [("bilinearity at acc1a", "infer"), ("[0] gemm r0", "infer"), ("[5] gemm r4", "train")]
)
def test_what_is_quoted_is_printed(
    start: str, mode: Literal["infer", "train"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("docs.norm", None)
    from docs.norm import build

    model, args = build()
    printed = render(program(model, args, {}, mode, Settings(target="sm_90a")))
    lines = [line.strip().replace(str(ROOT) + "/", "") for line in printed.splitlines()]
    assert all(line in lines for line in quoted(start)), printed


def test_the_stages_are_told_in_their_order() -> None:
    table = TEXT.split("| stage of `inductor/joint.py` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [stage.__name__ for stage in joint.STAGES]


@pytest.mark.parametrize("page", [TEXT, (ROOT / "docs" / "numerics.md").read_text()], ids=["architecture", "numerics"])
def test_every_file_that_the_text_names_is_there(page: str) -> None:
    names = {word.strip("`(),.;:") for word in page.split() if "/" in word and word.strip("`(),.;:").endswith(".py")}
    assert len(names) > 5
    assert not [n for n in names if not (ROOT / n).exists() and not (ROOT / "coda_inductor" / n).exists()]
