"""What is written for people to read: the folder of a graph, the log, torch's own artifacts."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from compiling import INNER, REFERENCE, TOKENS, WIDTH, half, pretend, run, streams
from processes import python
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import coda_inductor.backend  # noqa: F401  (torch.compile imports it, and it reads the environment a first time)

pytestmark = pytest.mark.usefixtures("uncached")


def test_debug_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder for each graph; also for graphs that Inductor has in its cache."""
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    root, dtype = tmp_path / "debug", torch.bfloat16
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            ran = run(half(dtype), *streams(dtype), options={"debug_dir": root})
            assert ran == [] and ran.regions == [3]
    run(half(dtype), *streams(dtype, 8), options={"debug_dir": root})
    run(torch.sin, streams(dtype)[0], options={"debug_dir": root})
    assert sorted(p.name for p in root.iterdir()) == [f"graph_{i:03d}" for i in range(4)]
    for first in ("graph_000", "graph_001"):
        before, after = ((root / first / f"{name}.py").read_text() for name in ("before", "after"))
        assert before.count("aten.mm.default") == 4 and "coda.region" not in before and "compiling.py" in before
        assert after.count("coda.region.default(") == 3 and "aten.mm.default(" not in after
        told = (root / first / "regions.txt").read_text()
        sites = ran.reports[0].sites
        assert all(f"# {s.name} {s.source}" in told for s in sites) and told.count(f", {INNER}] = in0 @") == 2
        kernels = sorted((root / first / "kernels").iterdir())
        assert [p.name for p in kernels] == [f"{s.name}_{s.region.digest}.py" for s in sites]
        assert all("def epilogue(acc" in p.read_text() for p in kernels)
    assert "left to Inductor: " in (root / "graph_002" / "regions.txt").read_text()
    assert "fewer than 256" in (root / "graph_002" / "regions.txt").read_text()
    assert "no matrix product" in (root / "graph_003" / "regions.txt").read_text()


def test_debug_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run(half(), *streams(), options={**REFERENCE, "debug_dir": tmp_path / "file"})
    assert ran.regions == [3] and len(ran) == 1 and "nothing is written for debugging: " in ran[0]


def test_log_shows_regions_and_refusals(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "coda_inductor"):
        run(half(), *streams(), options={**REFERENCE, "disable": "bilinearity"})
    text = caplog.text
    assert "3 regions, " in text and "store v" in text and "refused: " in text


def test_names_of_kernels_are_short() -> None:
    """Triton cuts off a file's name, and torch caches no kernel whose file it does not find (post_pass.py)."""

    def copied(x: Tensor, w: Tensor) -> Tensor:
        heads = (x @ w).view(TOKENS, -1, 16).unsqueeze(0).transpose(1, 2)
        angles = torch.arange(TOKENS, dtype=x.dtype).unsqueeze(1).expand(TOKENS, 16).cos()
        turned = torch.cat((-heads[..., 8:], heads[..., :8]), -1)
        return torch.bmm((turned * angles).squeeze(0), (heads * angles).squeeze(0).transpose(1, 2))

    x, w = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH)
    compiled = torch.compile(copied, backend="coda", options=REFERENCE)
    got, code = run_and_get_code(compiled, x, w)
    assert torch.allclose(got, copied(x, w), atol=1e-3)
    named = set(re.findall(r"cpp_(fused_\w+?)_\d+", "".join(code)))
    assert any({"cat", "neg"} <= set(name.split("_")) for name in named)
    for view in ("view", "unsqueeze", "transpose", "slice", "expand"):
        assert not any(view in name.split("_") for name in named)


def test_torch_logs_knows_our_name(tmp_path: Path) -> None:
    code = """
import torch._logging._internal
torch._logging._internal._init_logs()  # TORCH_LOGS, as when torch is imported
from compiling import *
from quick import quick
quick()
run(half(), *streams(), options=REFERENCE)
"""
    done = python(code, TORCH_LOGS="+coda_inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert (
        done.returncode == 0
        and "3 regions, " in done.stderr
        and "# r0 " in done.stderr
        and "(K=64, f64)" in done.stderr
    ), done.stderr[-2000:]


def test_tlparse_artifact_for_every_graph(tmp_path: Path) -> None:
    code = """
import sys, torch._logging._internal
torch._logging._internal.LOG_TRACE_HANDLER.root_dir = sys.argv[1]  # TORCH_TRACE, when torch is imported
from compiling import *
from quick import quick
quick()
run(half(), *streams(), options=REFERENCE)
run(half(), *streams())
run(torch.sin, streams()[0], options=REFERENCE)
"""
    done = python(code, str(tmp_path / "trace"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cached"))
    assert done.returncode == 0, done.stderr
    text = "".join(p.read_text() for p in (tmp_path / "trace").iterdir())
    assert text.count('"name": "coda_regions"') >= 2
    assert "load " in text and "left to Inductor: no matrix product" in text
