"""The worked example of docs/architecture.md: what its text quotes is what the commands print."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Literal

import pytest

from coda_inductor.core.settings import Settings
from coda_inductor.explain.listing import render
from coda_inductor.explain.steps import program

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def quoted(start: str) -> list[str]:
    """The lines of the text's indented block that begins so, without their indents."""
    block = TEXT[TEXT.index(f"    {start}") :].split("\n\n")[0]
    return [line.strip() for line in dedent(block).splitlines()]


@pytest.mark.parametrize(
    ("start", "mode"), [("bilinearity at acc1a", "infer"), ("[0] gemm r0", "infer"), ("[3] gemm r2", "train")]
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


def test_every_file_that_the_text_names_is_there() -> None:
    names = {word.strip("`(),.;") for word in TEXT.split() if "/" in word and word.strip("`(),.;").endswith(".py")}
    assert len(names) > 10
    assert not [n for n in names if not (ROOT / n).exists() and not (ROOT / "coda_inductor" / n).exists()]
