"""Where torchao is installed: its layers under FSDP2 on two ranks, whose weights are tensor subclasses, cast before or
after they are gathered. The collectives are gloo's, on the CPU; the Regions run on torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from float8_layers import by_row
from processes import said_by_ranks
from rank_float8 import CASES, STEPS
from rank_training import RANKS


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks say, a row for each case."""
    pytest.importorskip("torchao.float8")
    return said_by_ranks("rank_float8", RANKS, tmp_path_factory.mktemp("ranks") / "store")


@by_row
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_inductors(rows: list[dict[str, Any]], case: str) -> None:
    """To a few roundings to bfloat16, and in Regions."""
    rows = [row for row in rows if row["case"] == case]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    for row in rows:
        assert row["coda"] == pytest.approx(row["inductor"], rel=2e-3) and len(row["coda"]) == STEPS
        assert row["regions"] and all(count >= 4 for count in row["regions"]), row
