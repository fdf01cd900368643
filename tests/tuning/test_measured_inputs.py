"""What a Region is measured with lies as what it is launched with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiling import pretend, run
from torch import Tensor, nn

from coda_inductor.kernels import launch

pytestmark = pytest.mark.usefixtures("uncached")


class Temperature(nn.Module):
    """A layer whose result is scaled by one learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(64, 128), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x) * self.scale)


def test_a_number_for_all_features_is_a_vector_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    ran = run(Temperature().bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16))
    assert sum(launch.LAUNCHES.values()) > 0 and any(report.sites for report in ran.reports)
    assert launch.FALLBACKS == {}  # none says that an input was copied
