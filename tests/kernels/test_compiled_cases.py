"""Real kernels compiled for sm_90a without a GPU, in a process of their own: cutlass reads the target when imported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from codegen_cases import CASES
from compiler_process import MISSING
from processes import fresh

from coda_inductor.codegen.target import SM_90A

SCRIPT = """
import json, sys
from pathlib import Path
import quack.gemm_sm90
chosen = []
stages = quack.gemm_sm90.GemmSm90._compute_stages.__func__
def watched(cls, *args, **kwargs):
    chosen.append(stages(cls, *args, **kwargs))
    return chosen[-1]
quack.gemm_sm90.GemmSm90._compute_stages = classmethod(watched)
import codegen_cases as cases
from coda_inductor.codegen import legality; from coda_inductor.kernels import library
from coda_inductor.kernels.kernel import Compiled, without_gpu
from coda_inductor.codegen.tiles import Config
without_gpu()
FIRST = (cases.norm_gradients, cases.swiglu_backward, *cases.EIGHT_BITS)
def kept(region, config, swapped):
    place = library.folder(region, config, Path(sys.argv[1]), swapped=swapped)
    return json.loads((place / library.KEPT).read_text())
for i, make in enumerate(cases.CASES):
    if make.__name__ not in sys.argv[2:]:
        continue
    region = make(4096, 4096)
    pair = len(region.products) == 2
    first = legality.candidates(region, 8192)[0]
    tiles = (Config(128, 256, 1, 2, False), Config(128, 192, 2, 1, True, "n"), first, Config(64, 64, 1, 1, False))
    config = tiles[i % 4] if legality.is_legal(region, tiles[i % 4]) and make not in FIRST else first
    if make is cases.rotary_norm:  # where the memory of sums over heads takes a stage
        region, config = make(4096, 4096, 32), Config(128, 64, 1, 1, False)
    kernel = Compiled(region, config, Path(sys.argv[1]), swapped=pair and config.pingpong)
    model = legality.stages(region, config)
    print(json.dumps({"case": make.__name__, "config": str(config), "stack": kernel.stack, "found": chosen[-1],
                      "model": [model.ab, model.store if region.stores else chosen[-1][1], model.load],
                      "fields": kept(region, config, pair and config.pingpong)["fields"]}))
    if make is cases.norm_producer:
        used = config
count = len(chosen)
Compiled(cases.norm_producer(1000, 64), used, Path(sys.argv[1]))
print(json.dumps({"case": "other extents", "compiled": len(chosen) - count}))
"""


TWO_WEIGHTS = ("swiglu", "lane_sums", "scaled_swiglu", "sample_swiglu")

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


ALL = [make.__name__ for make in CASES]
WITH_ANOTHER = (
    "sample_gate", "sample_swiglu", "swiglu", "softmax_sum", "summed_norm_backward", "unlike_columns", "adapter",
    "bias_sums", "every_op", "rotary_tables", "rotary_neighbours_alone", "turned_left", "nested_sums", "scaled_swiglu",
    "scaled_swiglu_backward", "plain", "token_scale", "norm_backward", "rotary", "rotary_neighbours", "head_norm",
)  # fmt: skip
"""Cases whose kernels have nothing that those of the others do not have: a minute and more, which `-m slow` takes."""
SOME = [name for name in ALL if name not in WITH_ANOTHER]


@pytest.fixture(scope="module", params=[SOME, ALL], ids=["some", "all"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    environment: dict[str, Any] = dict(pair.split("=") for pair in SM_90A.environment)
    done = fresh(SCRIPT, str(tmp_path_factory.mktemp("kernels")), *request.param, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows[:-1]] == request.param
    return rows


def test_every_case_compiles(rows: list[dict[str, object]]) -> None:
    """In one legal tile each, by turns; on a GPU tests/gpu/test_kernels.py runs them in others."""
    for row in rows[:-1]:
        assert isinstance(row["stack"], int), row
        assert ("lane_offset" in str(row["fields"])) == (row["case"] in TWO_WEIGHTS)
        assert ("a_apart" in str(row["fields"])) == (row["case"] in ("summed", "summed_norm_backward"))
        assert ("a_second" in str(row["fields"])) == (row["case"] in ("unlike", "unlike_columns", "adapter"))


def test_the_stage_model_is_quacks(rows: list[dict[str, object]]) -> None:
    for row in rows[:-1]:
        assert row["found"] == row["model"], row


def test_gradients_spill_nothing_in_the_tile_tried_first(rows: list[dict[str, object]]) -> None:
    """Two tile operands with sums over tokens, or with three stores and two sums over features."""
    stacks = {row["case"]: row["stack"] for row in rows[:-1] if row["config"] == str(SM_90A.heavy[0])}
    assert (stacks["norm_gradients"], stacks["swiglu_backward"]) == (0, 0)


def test_other_extents_share_the_kernel(rows: list[dict[str, object]]) -> None:
    assert rows[-1]["compiled"] == 0
