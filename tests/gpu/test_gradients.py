"""Training on the GPU: every gradient's error against float64 is no worse than eager's, and kernels of the backward
ran."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_training_device import MODELS, WIDTH, errors, gradients

from coda_inductor.codegen import launch
from coda_inductor.inductor.joint_pass import REPORTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]

WORSE = 1.5  # times eager's error: another order of sums, and other places to round


@pytest.mark.parametrize("tune", ["off", "quick"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_good_as_eagers(name: str, tune: str, tmp_path: Path) -> None:
    """tune=off keeps every Region that was derived, quick those that win at these small sizes."""
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", torch.bfloat16)
    x = torch.randn(4, 1024, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    wanted = gradients(exact(x64), exact, x64)
    eager = errors(gradients(model(x), model, x), wanted)
    REPORTS.clear()
    compiled = torch.compile(model, backend="coda", options={"cache_dir": str(tmp_path), "tune": tune, "strict": True})
    compiled(x)
    launch.LAUNCHES.clear()
    mine = errors(gradients(compiled(x), model, x), wanted)
    assert all(a < WORSE * b for a, b in zip(mine, eager, strict=True)), list(zip(mine, eager, strict=True))
    (report,) = REPORTS
    assert sum(launch.LAUNCHES.values()) == len(report.sites) + len(report.swept) and not launch.FALLBACKS
    assert len(report.sites) > 10 or tune == "quick"
