"""Every snippet of docs/using.md runs, and its loss (or scores, or image) and its gradients are those of the same
program by another backend: with the graphs that Inductor would compile interpreted; by `-m slow` with its code."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch.distributed as dist
from processes import Script
from quick import quick
from snippets import BLOCK, PAGE, RANKS, ROOT, Snippet, held, interpreted, snippets

from coda_inductor import cli

HERE = Path(__file__).parent
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).double()
torch.compile(model, backend="coda")(torch.randn(512, 64).double()).sum().backward()
"""
ON_CPU = [s for s in snippets() if s.kind == "cpu"]
RANKED = [s for s in snippets() if s.kind == "ranks"]
LINES = {line.partition("  #")[0].strip(): s for s in snippets() if s.kind == "shell" for line in s.code.splitlines()}
COMMANDS = [*LINES]
on_cpu = pytest.mark.parametrize("snippet", ON_CPU, ids=lambda s: s.title)


def is_right(snippet: Snippet, row: dict[str, Any]) -> None:
    print(row)
    tolerance = float(snippet.told.get("tolerance", 1e-6))
    assert row["error"] <= tolerance and row["gradients"] <= 100 * tolerance, row
    assert any(row["regions"]) is (snippet.told.get("regions") != "0"), row
    trains = ".backward(" in snippet.code or "Trainer(" in snippet.code
    assert bool(row["count"]) is trains, "nothing was trained"


def prepare(snippet: Snippet, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    if package := snippet.told.get("needs"):
        pytest.importorskip(package, reason=f"{snippet.title} of docs/using.md needs {package}")
    monkeypatch.chdir(folder)  # for what is written
    quick()


@pytest.mark.sampled
@on_cpu
def test_a_snippet(snippet: Snippet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare(snippet, monkeypatch, tmp_path)
    with interpreted():
        is_right(snippet, held(snippet))


@on_cpu
def test_with_inductors_code(snippet: Snippet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare(snippet, monkeypatch, tmp_path)
    with evaluate.strict_reference():
        is_right(snippet, held(snippet))


@functools.cache
def ranks() -> list[dict[str, Any]]:
    """What two ranks say, a row for each snippet and rank: forks, with what torchrun sets."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import snippets; snippets.main(sys.argv[2])"
    place = tempfile.mkdtemp()
    told = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    scripts = [
        Script(code, str(HERE), place, environment={**told, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    ends = [script.done() for script in scripts]
    print(*(end.stderr[-3000:] for end in ends), file=sys.stderr)
    return [json.loads(line) for end in ends for line in end.stdout.splitlines() if line.startswith("{")]


needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@needs_ranks
@pytest.mark.parametrize("snippet", RANKED, ids=lambda s: s.title)
def test_of_two_ranks(snippet: Snippet) -> None:
    rows = [row for row in ranks() if row["title"] == snippet.title]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    for row in rows:
        is_right(snippet, row)


@needs_ranks
def test_two_ranks_by_torchrun(tmp_path: Path) -> None:
    """The same, launched as the page says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command += [str(HERE / "snippets.py"), str(tmp_path)]
    ended = subprocess.run(command, env=found, capture_output=True, text=True, timeout=500)
    rows = [json.loads(row) for row in re.findall(r"\{.*?\}", ended.stdout)]
    assert ended.returncode == 0 and len(rows) == RANKS * len(RANKED), ended.stderr[-3000:]
    for snippet in RANKED:
        for row in (row for row in rows if row["title"] == snippet.title):
            is_right(snippet, row)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder with the page's modules and a train.py."""
    for snippet in snippets():
        if snippet.kind == "file":
            (tmp_path / snippet.told["name"]).write_text(snippet.code)
            monkeypatch.delitem(sys.modules, Path(snippet.told["name"]).stem, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("coda-inductor ")])
def test_the_command_line(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if package := LINES[line].told.get("needs"):
        pytest.importorskip(package, reason=f"{line} needs {package}")
    assert cli.main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    product = "[4096, 12288]" if "flux" in line else "[8192, 4096]"
    assert product in said and re.search(r": [1-9]\d* regions?\n|\[0\] gemm r0", said), said


@pytest.mark.parametrize("line", [c for c in COMMANDS if "train.py" in c])
def test_a_command(line: str, folder: Path) -> None:
    """Run by a shell. What is switched off is not derived; what is logged is there."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CODA_INDUCTOR")}
    clean |= {"CODA_INDUCTOR_TARGET": "reference", "PYTHONPATH": str(ROOT), "TORCH_LOGS": "coda_inductor"}
    clean |= {"PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    ended = subprocess.run(line, shell=True, env=clean, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ("regions, " in ended.stderr) is ("CODA_INDUCTOR=0" not in line), ended.stderr
    assert ("acc" in ended.stderr) is ("+coda" in line), ended.stderr


def test_every_block_is_run() -> None:
    text = PAGE.read_text()
    assert text.count("```") == 2 * len(BLOCK.findall(text)), "a block without a comment that says where it runs"
    assert {s.kind for s in snippets()} == {"cpu", "ranks", "shell", "file"}
    assert all("compare" in s.told for s in [*ON_CPU, *RANKED])
    assert sorted(COMMANDS) == sorted(c for c in COMMANDS if "train.py" in c or c.startswith("coda-inductor "))


def test_links_and_contents() -> None:
    """Every file is there, but for a page that is written elsewhere; every heading is among the contents."""
    text = PAGE.read_text()
    files = set(re.findall(r"\]\(([^)#]+)", text))
    assert {f for f in files if not (PAGE.parent / f).exists()} <= {"options.md"}
    anchors = [
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall("^## (.*)$", text, re.M)
    ]
    linked = re.findall(r"\]\(#([^)]+)\)", text)
    assert [a for a in dict.fromkeys(linked) if a not in anchors] == [] and set(anchors) == set(linked)
