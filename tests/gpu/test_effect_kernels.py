"""On the GPU, in bfloat16, with kernels of ours: programs with effects are as exact as eager, in CUDA graphs too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from alias_programs import ALIASES
from effect_programs import EFFECTS
from effect_reads import matrix
from late_programs import LATE
from programs import Program, Seen, off, seen
from reinplaced_programs import REINPLACED

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]

SIZES = {"T": 512, "D": 256, "E": 512, "H": 128, "B": 2, "M": 1024, "S": 511}
NORMAL: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "sizes": SIZES}
READS = {n: p for n, p in matrix().items() if p.infer and "normal_" not in n}  # whose draws depend on the dtype
STATES: tuple[str, ...] = ("momentum_inside", "teacher", "cache_shifted", "zeroed_with_gradient", "read_between_writes")
STATES += ("operations_between", "exchanged_by_an_operation", "adapter_merged")
ALL = (
    READS
    | LATE
    | REINPLACED
    | {n: EFFECTS[n] for n in STATES}
    | {n: ALIASES[n] for n in ("view_of_an_output", "turned_and_its_base")}
)


def modes(table: dict[str, Program]) -> list[Any]:
    """Where each runs, also in training where Inductor itself is wrong."""
    found = [(n, False) for n in table] + [(n, True) for n, p in table.items() if p.train is not None]
    return [pytest.param(n, train, id=f"{n}-{'train' if train else 'infer'}") for n, train in found]


def as_exact_as_eager(p: Program, train: bool, directory: Path, *, graphs: bool = False) -> None:
    """Each value's error against float64 is less than 1.5 times eager's, and Regions of ours were launched, where the
    program's row says that there are any."""
    exact: Seen = seen(p, lambda model: model, train, **NORMAL | {"dtype": torch.float64})
    eager: Seen = seen(p, lambda model: model, train, **NORMAL)
    options: dict[str, Any] = {"cache_dir": str(directory), "tune": "off", "strict": True}
    if graphs:  # what mode="reduce-overhead" sets; torch.compile takes a mode or options
        options["inductor.triton.cudagraphs"] = True
    REPORTS.clear()
    launch.LAUNCHES.clear()
    torch._dynamo.reset()
    found = seen(p, partial(torch.compile, backend="coda", options=options), train, **NORMAL)
    assert graphs or found.facts == eager.facts
    mine, theirs = off(found.values, exact.values), off(eager.values, exact.values)
    assert all(mine[name] < 1.5 * error + 2e-3 for name, error in theirs.items()), (mine, theirs)
    launched = sum(launch.LAUNCHES.values()) >= 1 and any(report.sites for report in REPORTS)
    assert launched or (p.train if train else p.infer) == 0
    assert all("was copied" in why for why in launch.FALLBACKS)  # of an input whose rows start anywhere


@pytest.mark.parametrize(("name", "train"), modes(ALL))
def test_effects_with_kernels(name: str, train: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All share the kernels that were built for another."""
    as_exact_as_eager(ALL[name], train, tmp_path_factory.getbasetemp() / "kernels")


@pytest.mark.parametrize("name", STATES)
def test_effects_within_cuda_graphs(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without gradients: what several steps of a training return, CUDA graphs overwrite."""
    as_exact_as_eager(ALL[name], False, tmp_path_factory.getbasetemp() / "kernels", graphs=True)
