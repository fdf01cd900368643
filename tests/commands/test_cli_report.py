"""coda-inductor report: one file whose links all lead somewhere, whose text is the user's and never markup."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from asking import Ask
from asking import ask as ask
from asking import folder as folder

from coda_inductor.codegen import legality
from coda_inductor.commands import page
from coda_inductor.commands.page_view import NO_STEP, Linked, Links, runs, snippet
from coda_inductor.core.settings import Settings
from coda_inductor.explain.study import Study, study
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import record, store

EVIL = "<script>alert('&\"')</script>"
MODEL = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.gate, self.up = nn.Linear(256, 512, bias=False), nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))  # {EVIL}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.named = nn.ModuleDict({{"<b>&": nn.Linear(256, 256, bias=False)}})
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        x = self.named["<b>&"](x).relu()
        for layer in self.layers:
            x = layer(x)
        return x.cumsum(1)

def build(dtype=torch.bfloat16):
    return Model().to(dtype), (torch.empty(512, 256, dtype=dtype),)

def wide():
    return build(torch.float32)
"""
VOID = {"meta", "br", "link"}


class Page(HTMLParser):
    """What a browser would see: ids, links, tags, text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")
            if name in ("src", "srcset", "data", "action"):
                self.loads.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "p", "summary"):
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The functions of a module of the user's."""
    here = tmp_path_factory.mktemp("theirs")
    (here / "page_model.py").write_text(MODEL)
    sys.path.insert(0, str(here))
    import page_model  # type: ignore[import-not-found]

    sys.path.remove(str(here))
    return lambda name: getattr(page_model, name)()


def studied(made: tuple[Any, Any], mode: Any, target: Any) -> Study:
    return study(*made, {}, mode, Settings(target=target))


@pytest.fixture(scope="module")
def trained(build: Callable[[str], Any]) -> Study:
    return studied(build("build"), "train", "sm_90a")


def html(found: Study, cache: Path, target: Any = "sm_90a") -> str:
    return page.html(found, Settings(target=target, cache_dir=str(cache)), f"m:{EVIL}", "train")


@pytest.fixture
def text(trained: Study, tmp_path: Path) -> str:
    return html(trained, tmp_path / "store")


def test_every_link_leads_to_one_place(text: str) -> None:
    found = Page(text)
    assert found.open == [] and [i for i, n in Counter(found.ids).items() if n > 1] == []
    assert len(found.links) > 100 and all(link.startswith("#") for link in found.links)
    assert sorted({link[1:] for link in found.links} - {*found.ids}) == []


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    found = Page(text)
    assert found.loads == [] and found.tags["link"] == found.tags["img"] == found.tags["iframe"] == 0
    assert "default-src 'none'" in text and not re.search(r"url\(|@import|https?://", text)


def test_what_the_user_wrote_is_text(text: str) -> None:
    found = Page(text)
    assert EVIL not in text and found.tags["script"] == 1
    assert f"# {EVIL}" in found.text  # the comment of the line that is shown
    assert "named.<b>&" in found.text and "<b>&" not in text
    assert f"m:{EVIL}" in found.text


def test_it_has_all_steps_regions_laws_and_kernels(text: str, trained: Study) -> None:
    (graph,), (program,) = trained.explained["graphs"], trained.programs
    ids = {*Page(text).ids}
    assert {f"g0-s{s['id']}" for s in program["after"]} | {f"g0-{r['id']}" for r in graph["regions"]} <= ids
    assert {f"kernel-{r['digest']}" for r in graph["regions"]} <= ids
    assert {f"law-{law}" for r in graph["regions"] for law in r["laws"]} <= ids
    assert {"summary", "graph-0", "regions-0", "left-0", "laws", "kernels", "timings"} <= ids


def test_it_says_what_explain_says(text: str, trained: Study) -> None:
    said, (graph,) = Page(text).text, trained.explained["graphs"]
    for group in graph["groups"]:
        title = group["module"] + (f" x{group['count']}" if group["count"] > 1 else "")
        assert title in said, title
    assert all(p["why"] in said and p["what"] in said for p in graph["passes"])
    assert "aten.cumsum.default is not an operation that we lift" in said
    for firing in trained.programs[0]["laws"][:1]:
        assert firing["before"] in said and firing["after"] in said
    assert "@two_products(" in said and "def epilogue(acc" in said  # a generated module
    assert "return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))" in said
    assert "None of these Regions was measured" in said


def test_equal_layers_are_folded_and_all_steps_are_there(trained: Study) -> None:
    steps = [NO_STEP | s for s in trained.programs[0]["after"]]
    found = [*runs(steps)]
    assert [s["id"] for run in found for time in run.times for s in time] == [s["id"] for s in steps]
    assert sum(len(run.times) > 2 for run in found) >= 2  # of the forward and of the backward


def step(i: int, module: str, kind: str = "gemm") -> dict[str, Any]:
    facts = {"id": i, "kind": kind, "module": module, "source": "", "laws": [], "stores": [], "products": []}
    return {**facts, "digest": "", "what": kind, "operations": ""}


def test_runs_of_layers() -> None:
    names = ["embed", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a", "h.2.b", "head", "head"]
    found = [*runs([step(i, name) for i, name in enumerate(names)])]
    assert [(len(r.times), len(r.times[0]), r.module) for r in found] == [
        (1, 1, "embed"), (3, 2, "h.*"), (1, 1, "head"), (1, 1, "head"),
    ]  # fmt: skip


def test_values_link_to_the_steps_that_make_them() -> None:
    made = {**step(3, ""), "products": [{"name": "acc3a"}], "stores": [{"name": "y3"}], "sums": [{"name": "s3"}]}
    links = Links(1, [made])
    assert links.text("2*acc3a + fc.y3 + s4*s3") == [
        Linked("2*"), Linked("acc3a", "g1-s3"), Linked(" + fc.y3 + s4*"), Linked("s3", "g1-s3"),
    ]  # fmt: skip
    assert links.text("acc3a", own=3) == [Linked("acc3a")]
    assert links.readers(["[3]", "output", "[3]"]) == [Linked("[3]", "g1-s3"), Linked("output")]


def test_a_line_that_cannot_be_read_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("a\nb\nc\n")
    assert snippet(f"{tmp_path}/m.py:2") == [(1, "a", False), (2, "b", True), (3, "c", False)]
    assert snippet(f"{tmp_path}/m.py:9") == snippet(f"{tmp_path}/none.py:1") == snippet("") == []


def test_what_was_measured_is_shown(trained: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tuning in the store, a measurement in the store, and one of this process; others are not these Regions'."""
    cache = store.open_store(str(tmp_path / "store"))
    site, rows = trained.sites[0][0]
    tile = legality.candidates(site.region, rows)[0]
    record.remember(cache, site.region, legality.bucket(rows), tile, 1.234, [])
    times = {"busy_ms": 2.0, "busy_baseline_ms": 3.0, "baseline_ms": 3.456}
    store.write_record(cache, "contest-a", {"regions": [site.region.digest], "ms": 2.345, **times})
    store.write_record(cache, "contest-b", {"regions": ["another"], "ms": 7.777, **times})
    mine = {"regions": [site.region.digest], "ms": 4.567, "baseline_ms": 5.678, "against": ["other"]}
    monkeypatch.setattr(page, "REPORTS", [*REPORTS, Report(timings=(mine,))])
    said = Page(html(trained, cache)).text
    assert "1.234" in said and "2.345 3.456" in said and "7.777" not in said and f"{tile} (chosen" in said
    assert "against the program without its law 4.567 5.678 this process" in said
    assert "None of these Regions was measured" not in said


def test_a_region_without_a_kernel_says_why(build: Callable[[str], Any], tmp_path: Path) -> None:
    found = studied(build("wide"), "infer", "reference")
    said = Page(html(found, tmp_path / "store", "reference")).text
    assert "No kernel is generated: " in said and "ms on an" not in said and "memory-bound time" not in said


def test_a_graph_that_is_left_says_so(build: Callable[[str], Any], tmp_path: Path) -> None:
    found = studied(build("wide"), "infer", "sm_90a")
    shown = Page(html(found, tmp_path / "store"))
    assert "Left untouched: its products are of float32" in shown.text and "There is none." in shown.text
    assert sorted({link[1:] for link in shown.links} - {*shown.ids}) == []


def test_the_command_writes_the_file(ask: Ask, folder: Path) -> None:
    out = folder.parent / "my page.html"
    status, facts, _ = ask("report", "tool_model:build", "--mode", "train", "--out", str(out), "--json")
    assert status == 0 and facts["file"] == str(out) and facts["bytes"] == out.stat().st_size
    assert facts["totals"]["regions"] == 4 and "tool_model:build" in Page(out.read_text()).text
    status, said, _ = ask("report", "tool_model:build")
    assert status == 0 and said.startswith("coda_report.html (") and "Regions, memory-bound bytes " in said
    status, _, error = ask("report", "tool_model:build", "--out", "no/such/folder.html")
    assert status == 2 and "cannot write no/such/folder.html: No such file or directory (name another" in error


def test_the_files_beside_it_are_in_the_wheel() -> None:
    settings = tomllib.loads((Path(page.__file__).parents[2] / "pyproject.toml").read_text())
    kept = settings["tool"]["setuptools"]["package-data"]["coda_inductor"]
    files = [p.name for p in page.HERE.iterdir() if p.is_file() and p.suffix != ".py"]
    assert len(files) == 3 and all(any(fnmatch(f"commands/{f}", k) for k in kept) for f in files)
