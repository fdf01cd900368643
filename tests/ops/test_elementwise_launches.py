"""What a compiled graph calls for an elementwise pass: without a kernel it runs on torch, with one warning."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coda_inductor.core.elementwise import Elementwise, Output, interpret, verify
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Let, Operand
from coda_inductor.core.settings import Settings
from coda_inductor.kernels.elementwise import triton_kernel
from coda_inductor.ops import elementwise

RECORD = verify(Elementwise(
    16, (Operand("x", "tile", "bf16"), Operand("s", "token", "f32")), (Let("v", "mul", ("x", "s")),),
    (Output("v", "e4m3"), Output("v", "e4m3", True)),
))  # fmt: skip


def launcher(monkeypatch: pytest.MonkeyPatch, strict: bool, cache_dir: Path) -> elementwise.Launcher:
    options = {"strict": strict, "cache_dir": str(cache_dir)}
    monkeypatch.setattr(elementwise, "current", lambda: Settings.read({}, options)[0])
    return elementwise.Launcher(RECORD.text)


def no_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def no_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_kernel.cache_clear()
    return tmp_path / "store"


@pytest.mark.parametrize("missing", [no_store, no_triton])
def test_without_a_kernel_it_runs_on_torch(missing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = [torch.randn(8, 16).bfloat16(), torch.rand(8)]
    wanted = interpret(RECORD, inputs)
    place = missing(monkeypatch, tmp_path)
    run = launcher(monkeypatch, False, place)
    out = torch.empty_like(wanted[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(inputs, [None, out])
    assert torch.equal(out.view(torch.uint8), wanted[1].view(torch.uint8))
    assert sum("an elementwise pass runs as separate operations" in str(w.message) for w in caught) == 1
    with pytest.raises(Unsupported):
        launcher(monkeypatch, True, place)(inputs, [None, out])


def test_with_a_kernel_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On what it is given, in any memory of the outputs."""
    called = list[Any]()
    monkeypatch.setattr(elementwise, "triton_kernel", lambda record, cache_dir: lambda *a: called.append((record, *a)))
    inputs = [torch.randn(8, 16).bfloat16(), torch.rand(8)]
    outs = [torch.empty(8, 16), SimpleNamespace()]
    launcher(monkeypatch, True, tmp_path)(inputs, outs)  # type: ignore[arg-type]
    assert called == [(RECORD, inputs, outs)]
