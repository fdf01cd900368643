"""Real kernels compiled for sm_90a without a GPU, in a process of their own: cutlass reads the target when imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from codegen_cases import norm_backward, swiglu, token_scale

from coda_inductor.codegen import prebuild as prebuild_module
from coda_inductor.codegen.legality import HEAVY, Config
from coda_inductor.codegen.prebuild import Job, prebuild

SCRIPT = """
import json, sys, time
from pathlib import Path
import quack.gemm_sm90
chosen = []
stages = quack.gemm_sm90.GemmSm90._compute_stages.__func__
def watched(cls, *args, **kwargs):
    chosen.append(stages(cls, *args, **kwargs))
    return chosen[-1]
quack.gemm_sm90.GemmSm90._compute_stages = classmethod(watched)
import codegen_cases as cases
from coda_inductor.codegen import legality
from coda_inductor.codegen.kernel import Compiled, without_gpu
from coda_inductor.codegen.legality import Config
without_gpu()
for i, make in enumerate(cases.CASES):
    region = make(4096, 4096)
    pair = len(region.products) == 2
    tiles = (Config(128, 256, 1, 2, False), Config(128, 192, 2, 1, True, "n"), Config(64, 64, 1, 1, False))
    for config in dict.fromkeys((tiles[i % 3], legality.candidates(region, 8192)[0])):
        if not legality.is_legal(region, config):
            continue
        began = time.perf_counter()
        kernel = Compiled(region, config, Path(sys.argv[1]), swapped=pair and config.pingpong)
        model = legality.stages(region, config)
        print(json.dumps({"case": make.__name__, "config": str(config), "stack": kernel.stack, "found": chosen[-1],
                          "model": [model.ab, model.store if region.stores else chosen[-1][1], model.load],
                          "fields": list(kernel._arguments._fields), "s": time.perf_counter() - began}))
count = len(chosen)
Compiled(cases.norm_producer(1000, 64), Config(128, 256, 1, 2, False), Path(sys.argv[1]))
print(json.dumps({"case": "other extents", "compiled": len(chosen) - count}))
"""


MISSING = [name for name in ("cutlass", "quack", "triton") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_case_compiles_in_its_legal_tiles(rows: list[dict[str, object]]) -> None:
    assert len({row["case"] for row in rows}) == 13
    for row in rows[:-1]:
        assert isinstance(row["stack"], int), row
        assert ("lane_offset" in str(row["fields"])) == (row["case"] in ("swiglu", "lane_sums"))


def test_the_stage_model_is_quacks(rows: list[dict[str, object]]) -> None:
    for row in rows[:-1]:
        assert row["found"] == row["model"], row


def test_gradients_spill_nothing_in_the_tile_tried_first(rows: list[dict[str, object]]) -> None:
    """Two tile operands with sums over tokens, or with three stores and two sums over features."""
    stacks = {row["case"]: row["stack"] for row in rows[:-1] if row["config"] == str(HEAVY[0])}
    assert (stacks["norm_gradients"], stacks["swiglu_backward"]) == (0, 0)


def test_other_extents_share_the_kernel(rows: list[dict[str, object]]) -> None:
    assert rows[-1]["compiled"] == 0


def test_workers_fill_the_store(tmp_path: Path) -> None:
    """Two kernels and one that quack refuses, in processes of their own; built again, they are found."""
    store = str(tmp_path / "kernels")
    config = Config(128, 128, 2, 1, True)
    jobs = [Job(token_scale(256, 64), config), Job(swiglu(256, 64), config, swapped=True)]
    too_big = Job(norm_backward(256, 64), Config(256, 192, 2, 1, False))
    failed = prebuild([*jobs, too_big, jobs[0]], store, workers=2)
    assert list(failed) == [too_big] and "stages" in failed[too_big]
    objects = {path: path.stat().st_mtime_ns for path in Path(store).glob("objects/*/*/*.o")}
    assert len(objects) == 2
    assert prebuild(jobs, store, workers=2) == {}
    assert objects == {path: path.stat().st_mtime_ns for path in Path(store).glob("objects/*/*/*.o")}


def test_the_compiling_process_may_die(tmp_path: Path) -> None:
    """Between requests and amid one: it is started again. A worker that dies is why its kernels are missing."""
    store, job = str(tmp_path / "kernels"), Job(token_scale(256, 64), Config(128, 128, 2, 1, True))
    prebuild_module.warm_up()
    first = prebuild_module._running[0]
    first.process.kill()
    first.process.wait()
    assert prebuild([], store) == {} and prebuild([job], store, workers=1) == {}
    second = prebuild_module._running[0]
    assert second is not first and second.alive()
    killer = threading.Timer(0.2, second.process.kill)
    killer.start()
    slow = Job(swiglu(256, 64), Config(128, 256, 1, 2, False))
    assert prebuild([slow], store, workers=1) == {}
    killer.join()
    third = prebuild_module._running[0]
    assert third is not second and list(Path(store).glob("objects/*128x256*/*/*.o"))
    crash = Job(norm_backward(256, 64), Config(128, 128, 2, 1, True))
    killer = threading.Timer(0.3, lambda: os.system(f"pkill -9 -P {third.process.pid}"))
    killer.start()
    failed = prebuild([crash], store, workers=1)
    killer.join()
    assert list(failed) == [crash] and "ended early" in failed[crash] and third.alive()
    assert prebuild([crash], store, workers=1) == {}


def test_a_graph_loads_the_compiler_before_its_first_launch() -> None:
    """What libraries leave on the GPU when imported must not lie in a CUDA graph's memory."""
    code = """
import sys
from codegen_cases import token_scale
from coda_inductor.inductor.launching import launcher
assert "quack" not in sys.modules
launcher(token_scale(64, 64).text)
assert "coda_inductor.codegen.kernel" in sys.modules and "quack" in sys.modules
"""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
