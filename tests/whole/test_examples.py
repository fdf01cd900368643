"""The examples run, at sizes for a CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from float8_layers import by_row
from quick import quick

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {"device": "cpu", "target": "reference", "steps": 8, "width": 64, "layers": 1, "batch": 2, "length": 64}


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("rowwise", marks=by_row)])
def test_float8_llama(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    if recipe != "bf16":
        pytest.importorskip("torchao.float8")
    quick()
    found = runpy.run_path(str(EXAMPLES / "float8_llama.py"))["main"](
        [f"--{name}={value}" for name, value in (SMALL | {"recipe": recipe}).items()]
    )
    ours, theirs = found["coda"], found["inductor"]
    assert ours["last"] == pytest.approx(theirs["last"], rel=1e-2) and ours["last"] < ours["first"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["coda", "inductor"]
