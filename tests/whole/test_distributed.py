"""Two ranks on one machine train the demo's Llama, with the wrappers that people use: losses and all gradients are
eager's on one rank. The collectives are gloo's, on the CPU; the Regions run on torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from processes import said_by_ranks
from rank_training import EXACT, KINDS, RANKS


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks say, a row for each kind."""
    return said_by_ranks("rank_training", RANKS, tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_eagers(rows: list[dict[str, Any]], kind: str) -> None:
    rows = [row for row in rows if row["kind"] == kind]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    assert all(row["error"] < EXACT and row["regions"] == KINDS[kind][2] for row in rows), rows
