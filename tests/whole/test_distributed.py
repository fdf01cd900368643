"""Two ranks on one machine train the demo's Llama, with the wrappers that people use: losses and all gradients are
eager's on one rank. The collectives are gloo's, on the CPU; the Regions run on torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from processes import said_by_ranks
from rank_training import EXACT, KINDS, RANKS

SOME = ("FSDP2", "TP and sequence parallel")


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks say, a row for each kind."""
    return said_by_ranks("rank_training", RANKS, tmp_path_factory.mktemp("ranks") / "store", *request.param)


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("rows", [SOME, tuple(KINDS)], ids=["some", "all"], indirect=True)
def test_losses_and_gradients_are_eagers(rows: list[dict[str, Any]], request: pytest.FixtureRequest) -> None:
    kinds = request.node.callspec.params["rows"]
    for kind in kinds:
        found = [row for row in rows if row["kind"] == kind]
        assert len(found) == RANKS, "a rank failed: see what it said"
        assert all(row["error"] < EXACT and row["regions"] == KINDS[kind][2] for row in found), found
