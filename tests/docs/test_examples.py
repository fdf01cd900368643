"""The examples run, small, on a CPU, and what they print holds. In this process the graphs that Inductor would compile
are interpreted, for both backends; the slow form runs each as a user does, as a script, with Inductor's code."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch._inductor.compile_fx
from float8_layers import by_row
from quick import quick

from coda_inductor.inductor.joint_pass import REPORTS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRAINED = {
    # how far the two losses may be apart, relative; Regions derived at that size; what is needed
    "train_llama": (5e-4, 11, ()),
    "trainer": (5e-4, 11, ("accelerate",)),
    "nanogpt": (5e-4, 7, ()),
    "titan_fsdp2": (5e-4, 8, ()),
    "lora": (5e-4, 19, ("peft",)),
    "float8_llama": (5e-3, 12, ("torchao.float8",)),
    "diffusion": (5e-3, 1, ()),
}
"""By example. Weights and what is between the products are bfloat16, products of FP8 rounder still; the images of
diffusion are drawn in bfloat16 throughout."""
NUMBER = r"[\d,.]+"

needs_row = pytest.param("float8_llama", marks=by_row)
each = pytest.mark.parametrize("name", [needs_row if n == "float8_llama" else n for n in TRAINED])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both backends, in this process."""
    quick()
    compile_fx = partial(torch._inductor.compile_fx.compile_fx, inner_compile=evaluate._interpreted)  # type: ignore[arg-type]
    with evaluate.strict_reference(run=False):
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
        yield


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> dict[str, Any]:
    """What the example's `main` returns."""
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--small", *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    REPORTS.clear()
    found: dict[str, Any] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    return found


def installed(name: str) -> None:
    for package in TRAINED[name][2]:
        pytest.importorskip(package, reason=f"examples/{name}.py needs {package}")


def agree(name: str, row: dict[str, Any]) -> None:
    """The row is whole, and both backends took the same steps."""
    ours, theirs = row["losses"]["coda"], row["losses"]["inductor"]
    assert ours == pytest.approx(theirs, rel=TRAINED[name][0]) and len(ours) == 4, row
    assert name == "diffusion" or len(set(ours)) == 4, "nothing was trained"
    unit = "images" if name == "diffusion" else "tokens"
    assert row["mode"] == ("infer" if name == "diffusion" else "train")
    assert row["ms"] > 0 and row["speedup"] == pytest.approx(row["baseline_ms"] / row["ms"])
    assert row[f"{unit}_per_s"] / row[f"baseline_{unit}_per_s"] == pytest.approx(row["speedup"])
    assert row["machine"] == "CPU" and row["gib"] is None, "memory is the GPU's"
    assert row["versions"]["torch"] == version("torch") and f"{name}.py --small" in row["command"]


def says(text: str, unit: str) -> None:
    """A line for each backend, with times, speed, seconds to compile and losses; and the ratio."""
    for backend in ("inductor", "coda"):
        wanted = rf"^{backend} +{NUMBER} +{NUMBER} +- +{NUMBER}   {NUMBER} -> {NUMBER}$"
        assert re.search(wanted, text, re.MULTILINE), text
    assert f"{unit}/s" in text and re.search(rf"^coda: {NUMBER} times as fast as inductor$", text, re.MULTILINE), text


@pytest.mark.sampled
@each
def test_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed(name)
    row = run(monkeypatch, name, "--out", str(tmp_path / "rows"))
    agree(name, row)
    says(capsys.readouterr().out, "images" if name == "diffusion" else "tokens")
    assert json.loads((tmp_path / "rows").read_text()) == row
    assert [len(report.sites) for report in REPORTS if report.rewrote] == [TRAINED[name][1]]


def script(name: str, *launcher: str, **environment: str) -> str:
    """What `python examples/NAME.py --small` prints in a clone, and logs. Nothing of ours is set."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CODA_INDUCTOR", "PYTEST"))} | environment
    command = [*(launcher or (sys.executable,)), f"examples/{name}.py", "--small"]
    ended = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout + ended.stderr


@each
def test_as_a_script(name: str) -> None:
    installed(name)
    said = script(name, TORCH_LOGS="coda_inductor", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    says(said, "images" if name == "diffusion" else "tokens")
    assert f"{TRAINED[name][1]} regions" in said


def test_two_ranks_by_torchrun() -> None:
    torchrun = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"
    said = script("titan_fsdp2", *torchrun, TORCH_LOGS="coda_inductor", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    says(said, "tokens")
    assert len(re.findall(r"\[rank\d\].* 8 regions", said)) == 2 and "512 tokens" in said, "of both ranks"
    both = [line.split("   ")[-1] for line in said.splitlines() if line.startswith(("inductor ", "coda "))]
    (first, last), (ours_first, ours_last) = ([float(x) for x in text.split(" -> ")] for text in both)
    assert (ours_first, ours_last) == pytest.approx((first, last), rel=5e-4)


def test_explain_yours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(monkeypatch, "explain_yours")
    assert found["infer"]["totals"]["regions"] == 4 and found["train"]["totals"]["regions"] > 4
    assert {law for region in found["infer"]["graphs"][0]["regions"] for law in region["laws"]} == {"bilinearity"}
    said = capsys.readouterr().out
    assert "--- infer: 4 Regions" in said and "--- train: " in said and "laws: bilinearity" in said


def test_explain_yours_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A module in the working folder, by name."""
    lines = [
        "import torch", "def build():", "    layers = torch.nn.Linear(64, 128), torch.nn.GELU()",
        "    return torch.nn.Sequential(*layers), (torch.zeros(512, 64),)",
    ]  # fmt: skip
    (tmp_path / "one_of_ours.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    found = run(monkeypatch, "explain_yours", "--model", "one_of_ours:build")
    assert found["infer"]["totals"]["regions"] == 1
    assert "one_of_ours.py" not in capsys.readouterr().err


def test_each_example_is_listed_and_short() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {f"{name}.py" for name in (*TRAINED, "explain_yours", "side_by_side")}
    assert all(name in listed for name in files)
    assert max(path.read_text().count("\n") for path in EXAMPLES.glob("*.py") if path.stem != "side_by_side") <= 120
