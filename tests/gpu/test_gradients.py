"""Training on the GPU: every gradient's error against float64 is no worse than eager's, and kernels of the backward
ran."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trained_layers import MODELS, WIDTH, as_good_as_eager

from coda_inductor.kernels import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]


@pytest.mark.parametrize("tune", ["off", "quick"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_good_as_eagers(name: str, tune: str, tmp_path: Path) -> None:
    """tune=off keeps every Region that was derived, quick those that win at these small sizes."""
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", torch.bfloat16)
    x = torch.randn(4, 1024, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    report = as_good_as_eager(model, x, tmp_path, tune)
    assert sum(launch.LAUNCHES.values()) == len(report.sites)
    assert len(report.sites) > 10 or tune == "quick"
