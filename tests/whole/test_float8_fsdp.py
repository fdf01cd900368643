"""Where torchao is installed: its layers under FSDP2 on two ranks, whose weights are tensor subclasses, cast before or
after they are gathered. The collectives are gloo's, on the CPU; the Regions run on torch."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch.distributed as dist
from float8_layers import by_row
from processes import Script
from rank_float8 import CASES, STEPS
from rank_training import RANKS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each case."""
    pytest.importorskip("torchao.float8")
    place = tmp_path_factory.mktemp("ranks") / "store"
    code = "import sys, rank_float8; rank_float8.main(int(sys.argv[1]), sys.argv[2])"
    settings = {"CODA_INDUCTOR_TARGET": "reference", "CODA_INDUCTOR_STRICT": "1"}
    scripts = [Script(code, str(rank), str(place), environment=settings) for rank in range(RANKS)]
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for script in scripts:
        ended = script.done()
        for line in filter(lambda said: said.startswith("{"), ended.stdout.splitlines()):
            row = json.loads(line)
            found[row["case"]].append(row)
        print(ended.stderr[-3000:], file=sys.stderr)
    return found


@by_row
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_inductors(ranks: dict[str, list[dict[str, Any]]], case: str) -> None:
    """To a few roundings to bfloat16, and in Regions."""
    rows = ranks[case]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    for row in rows:
        assert row["coda"] == pytest.approx(row["inductor"], rel=2e-3) and len(row["coda"]) == STEPS
        assert row["regions"] and all(count >= 4 for count in row["regions"]), row
