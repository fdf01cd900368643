"""Equal layers are one measurement, whatever the depth of the model that they stand in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import pretend
from torch import Tensor, fx, nn
from trained_layers import WIDTH, Layer

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.inductor.joint import rewrite
from coda_inductor.tuning.measurements import Measurements
from coda_inductor.tuning.tuner import Tuner
from coda_inductor.tuning.verdicts import Decisions

DEPTHS = (2, 3)


class Llama(nn.Module):
    """Layers between an embedding and a head, as a language model has them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.layers = nn.Sequential(*(Layer("hf", "separate", "F.silu", True, False) for _ in range(depth)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)))  # type: ignore[no-any-return]


def test_a_deeper_model_finds_what_one_of_two_layers_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No contest, and no tuning of a Region, is new in one of three layers; in its step of training there are more
    Regions."""
    pretend(monkeypatch, tmp_path)
    measured, regions = list[int](), list[int]()
    measure = Measurements.measure

    def counted(self: Measurements, *args: Any) -> dict[str, Any]:
        measured[-1] += 1
        return measure(self, *args)

    monkeypatch.setattr(Measurements, "measure", counted)
    settings = Settings.read()[0]

    def tuned(graph: fx.Graph) -> None:
        tuner = Tuner(settings, torch.device("cpu"), lambda error: pytest.fail(str(error)))
        decisions = Decisions(partial(legality.check, target=SM_90A), tuner)
        regions[-1] += len(rewrite(graph, settings, SM_90A.name, decisions).sites)

    for depth in DEPTHS:
        measured.append(0)
        regions.append(0)
        ids = torch.zeros(4, 80, dtype=torch.long)
        capture(Llama(depth).bfloat16(), (ids,), {}, "train", tuned, settings)
    assert measured[0] > 5 and measured[1] == 0
    assert regions[1] - regions[0] > 5 * (DEPTHS[1] - DEPTHS[0])
