"""Two ranks on one machine train the demo's Llama, with the wrappers that people use: losses and all gradients are
eager's on one rank. The collectives are gloo's, on the CPU; the Regions run on torch."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch.distributed as dist
from processes import Script
from rank_training import EXACT, KINDS, RANKS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each kind."""
    place = tmp_path_factory.mktemp("ranks") / "store"
    code = "import sys, rank_training; rank_training.main(int(sys.argv[1]), sys.argv[2])"
    settings = {"CODA_INDUCTOR_TARGET": "reference", "CODA_INDUCTOR_STRICT": "1"}
    scripts = [Script(code, str(rank), str(place), environment=settings) for rank in range(RANKS)]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for script in scripts:
        ended = script.done()
        for line in filter(lambda said: said.startswith("{"), ended.stdout.splitlines()):
            row = json.loads(line)
            found[row["kind"]].append(row)
        print(ended.stderr[-3000:], file=sys.stderr)
    return found


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_eagers(ranks: dict[str, list[dict[str, Any]]], kind: str) -> None:
    rows = ranks[kind]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    assert all(row["error"] < EXACT and row["regions"] == KINDS[kind][2] for row in rows), rows
