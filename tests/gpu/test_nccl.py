"""Two ranks, each with a GPU, train the demo's Llama with the wrappers that people use: kernels ran on both, and every
gradient's error against float64 is no worse than with the same wrapper and no compiler."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import fresh
from rank_training import BATCH, KINDS, RANKS, a_rank

from coda_inductor.demo import LENGTH, VOCABULARY, Llama

WORSE = 1.5  # times eager's error: another order of sums, and other places to round
TIMES = {"FSDP2": 2}  # a graph runs: both blocks are one


def sm_90s() -> int:
    return sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or sm_90s() < RANKS, reason=f"needs {RANKS} sm_90 GPUs"),
]


def gradients(wrapped: Any, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Of all parameters, whole, as float64."""
    for p in model.parameters():
        p.grad = None
    F.cross_entropy(wrapped(ids).flatten(0, 1).float(), labels.flatten()).backward()
    found: list[Any] = [p.grad for p in model.parameters()]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).double() for g in found]


def train(rank: int, kind: str, device: str) -> dict[str, Any]:
    """Two steps: the worst gradient's error as a multiple of eager's, the Regions, and the kernels' launches."""
    from coda_inductor.inductor.joint_pass import REPORTS
    from coda_inductor.kernels import launch

    make, same, _ = KINDS[kind]
    torch.manual_seed(0)
    plain = Llama().to(device, torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    ids, labels = torch.randint(VOCABULARY, (2, RANKS * BATCH, LENGTH)).to(device)
    wanted = gradients(exact, exact, ids, labels)
    mine = slice(None) if same else slice(rank * BATCH, (rank + 1) * BATCH)
    errors = []
    for backend in ("eager", "coda"):
        torch._dynamo.reset()
        REPORTS.clear()
        model = copy.deepcopy(plain)
        wrapped = make(model, backend)
        gradients(wrapped, model, ids[mine], labels[mine])
        launch.LAUNCHES.clear()
        found = gradients(wrapped, model, ids[mine], labels[mine])
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)])
    return {
        "worse": max(a / b for b, a in zip(*errors, strict=True)),
        "regions": [len(report.sites) for report in REPORTS],
        "launches": sum(launch.LAUNCHES.values()),
        "fallbacks": dict(launch.FALLBACKS),
    }


def main(rank: int, place: str) -> None:
    """Prints a line for each kind."""
    import torch._functorch.config
    import torch._inductor.config

    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    off = torch._functorch.config.patch(enable_autograd_cache=False)
    with a_rank(rank, place, "nccl"), torch._inductor.config.patch(fx_graph_cache=False), off:
        for kind in KINDS:
            print(json.dumps({"kind": kind, **train(rank, kind, device)}), flush=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each kind."""
    place = tmp_path_factory.mktemp("ranks") / "store"
    here = str(Path(__file__).parent)
    code = "import sys; sys.path.insert(0, sys.argv[3]); import test_nccl as t; t.main(int(sys.argv[1]), sys.argv[2])"
    settings = {"CODA_INDUCTOR_TUNE": "off", "CODA_INDUCTOR_STRICT": "1"}  # every Region is kept
    with ThreadPoolExecutor(RANKS) as pool:  # of processes: CUDA can't be used in a fork
        ends = pool.map(lambda rank: fresh(code, str(rank), str(place), here, cwd=None, **settings), range(RANKS))
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for ended in ends:
        for line in filter(lambda said: said.startswith("{"), ended.stdout.splitlines()):
            print(line)
            row = json.loads(line)
            found[row["kind"]].append(row)
        print(ended.stderr[-3000:], file=sys.stderr)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run_on_every_rank_and_gradients_are_as_good_as_eagers(
    ranks: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    rows = ranks[kind]
    assert len(rows) == RANKS, "a rank failed: see what it said"
    for row in rows:
        assert row["worse"] < WORSE and sum(row["regions"]) > 5, rows
        assert row["launches"] == TIMES.get(kind, 1) * sum(row["regions"]), rows
        assert all("too far apart" in reason for reason in row["fallbacks"]), rows  # small tensors, beside NCCL's
