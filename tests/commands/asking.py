"""The command asked in a working folder with a model and a store of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coda_inductor import cli
from coda_inductor.codegen import target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.errors import Unsupported

MODEL = """
import torch

def build():
    layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)]
    model = torch.nn.Sequential(*layers, torch.nn.GELU()).to(torch.bfloat16)
    return model, (torch.zeros(512, 64, dtype=torch.bfloat16),)
"""


def can_compile() -> bool:
    try:
        target.available(SM_90A.capability)
    except Unsupported:
        return False
    return True


needs_compiler = pytest.mark.skipif(not can_compile(), reason="quack or CuTeDSL is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the store, not made yet, in a working folder with a module `tool_model`."""
    (tmp_path / "tool_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tool_model", raising=False)
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


Ask = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command: exit status, facts if --json else text, what went to stderr."""

    def run(*arguments: str) -> tuple[int, Any, str]:
        status = cli.main(arguments)
        said = capsys.readouterr()
        return status, json.loads(said.out) if "--json" in arguments and said.out else said.out, said.err

    return run


BROKEN = """

def broken():
    def step(x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + 1
        return x

    return step, (torch.randn(4, 8),)
"""
"""The text of a model of which torch.compile captures no graph."""
