"""CUDA graphs in a process that finds every kernel and every contest on disk, so that kernels are loaded while it warms
up: what is then left in the graph's memory is an error of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
]

SCRIPT = """
import sys
import torch
from torch import nn
from coda_inductor.kernels import launch
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))
model = nn.Sequential(*(Block() for _ in range(2))).to("cuda", torch.bfloat16)
xs = [torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
with torch.no_grad():
    compiled = torch.compile(model, backend="coda", mode=sys.argv[1] if len(sys.argv) > 1 else None)
    compiled(xs[0])  # which also measures, where nobody has
    launch.LAUNCHES.clear()
    for x in xs:
        ours, theirs, exact = compiled(x).clone(), model(x), x
        torch.cuda.synchronize()
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()
print("compiler", "quack" in sys.modules)
print("launches", sum(launch.LAUNCHES.values()))
"""


def run(folder: Path, *mode: str) -> tuple[int, bool]:
    """Launches from Python (those of a CUDA graph are none), and whether the compiler was imported."""
    caches = {"CODA_INDUCTOR_CACHE_DIR": str(folder / "coda"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment = os.environ | caches | {"CODA_INDUCTOR_STRICT": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *mode], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split("launches ")[-1]), "compiler True" in done.stdout


def test_kernels_are_loaded_outside_of_the_graphs_memory(tmp_path: Path) -> None:
    """As libraries, or, where these are gone, by the compiler."""
    found, compiler = run(tmp_path)
    assert found >= 4 and found % 4 == 0 and not compiler  # other processes have it
    again, compiler = run(tmp_path, "reduce-overhead")
    assert again < found and not compiler
    for library in tmp_path.glob("coda/objects/**/*.so"):
        library.unlink()
    again, compiler = run(tmp_path, "reduce-overhead")
    assert again < found and compiler
