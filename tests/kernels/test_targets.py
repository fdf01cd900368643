"""Targets of which no card was at hand: kernels compiled without one, apart from those of others, and never on by
themselves. What they compute is seen on a card only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from codegen_cases import CASES, norm_producer, rotary, rotary_tables, swiglu, token_scale
from compiler_process import MISSING
from eight_bit_cases import scaled_norm_backward

from coda_inductor.codegen import legality, source, target
from coda_inductor.codegen.target import SM_90A, SM_100A, SM_120A, TARGETS, Target
from coda_inductor.codegen.tiles import Config, tiles
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels import library, prebuild
from coda_inductor.kernels.prebuild import Job

ROOT = Path(__file__).resolve().parents[2]
CASES_OF = {
    "sm_100a": ("norm_producer", "swiglu", "scaled"),
    "sm_103a": ("swiglu",),
    "sm_120a": ("rotary_tables", "scaled_norm_backward"),
}
"""By target: what is compiled here. bench/targets.py compiles all; those of sm_90a are test_compiled_cases.py's."""
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")
each_target = pytest.mark.parametrize("row", TARGETS.values(), ids=TARGETS)


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("name", CASES_OF)
def test_cases_compile_and_fit(name: str) -> None:
    """In the stages of the model, which bench/targets.py compares too, and within a block's shared memory."""
    command = [sys.executable, "bench/targets.py", "--target", name, "--cases", *CASES_OF[name]]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *rows, total = [json.loads(line) for line in done.stdout.splitlines()]
    assert total["compiled"] == len(rows) == len(CASES_OF[name]) and total["wrong"] == 0
    for found in rows:
        assert found["stages"] == found["model"] and found["shared"] <= TARGETS[name].shared_memory - 1024, found
        assert found["stack"] == 0, found  # in the tile that is tried first


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds the package and this folder's neighbours."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **more}


def test_only_the_tested_target_overlaps() -> None:
    """A warp that loads tiles [M, N] by itself reads them too early if only another waits (device_sm100.py)."""
    assert [row.name for row in TARGETS.values() if row.overlaps] == [SM_90A.name]
    assert [row.name for row in TARGETS.values() if row.tested] == [SM_90A.name]


@needs_compiler
def test_jobs_of_two_targets_are_done_in_their_processes(tmp_path: Path) -> None:
    """At once, into folders of their own: neither is taken for the other's."""
    region, store = token_scale(256, 64), str(tmp_path / "kernels")
    jobs = [Job(region, Config(128, 128, 1, 1, False), target=row.name) for row in (SM_90A, SM_100A)]
    assert prebuild.prebuild(jobs, store) == {}
    places = [job.place(Path(store)) for job in jobs]
    machine = [re.findall(rb"sm_\d+a", next(place.glob("*/*.o")).read_bytes()) for place in places]
    assert [{*found} for found in machine] == [{b"sm_90a"}, {b"sm_100a"}]
    assert len({compiler.target for compiler in prebuild._running}) == len(prebuild._running) >= 2


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_no_two_targets_share_a_kernel(make: Callable[[int, int], Any], tmp_path: Path) -> None:
    region, config = make(4096, 4096), Config(128, 128, 1, 1, False)
    places = [library.folder(region, config, tmp_path, target=row) for row in TARGETS.values()]
    assert len({place.parent.name for place in places}) == len({place.name for place in places}) == len(TARGETS)


def test_a_target_depends_on_its_own_device_code_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change for one machine compiles nothing anew for another."""
    here = Path(source.__file__)
    for path in here.parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(source, "__file__", str(tmp_path / here.name))
    before = {name: source.device_digest(row) for name, row in TARGETS.items()}
    own = tmp_path / f"{SM_100A.device}.py"
    own.write_text(own.read_text() + "# changed\n")
    after = {name: source.device_digest(row) for name, row in TARGETS.items()}
    changed = [name for name in TARGETS if after[name] != before[name]]
    assert changed == [name for name, row in TARGETS.items() if row.device == SM_100A.device]


@each_target
def test_every_case_has_tiles_or_a_reason(row: Target) -> None:
    """And what is tried is what the machine can multiply."""
    refused = set[str]()
    for make in CASES:
        region = make(4096, 4096)
        try:
            legality.check(region, row)
        except Unsupported:
            refused.add(make.__name__)
            continue
        for m in (1, 300, 1024, 8192):
            found = legality.candidates(region, m, row)
            assert found and all(legality.stages(region, c, row).ab >= row.least_stages for c in found)
            assert set(found) <= set(row.tiles)
    unlike = set() if row.unlike else {"unlike", "unlike_columns", "adapter"}
    adding = set() if row.adds else {"weight_gradient_added"}
    assert refused == unlike | adding | (set() if row.mixes else {"scaled_norm_backward"})


@pytest.mark.parametrize(
    ("region", "tile", "row", "reason"),
    [
        (rotary_tables(4096, 4096), "128x128pp1x1", SM_120A, "shared memory for 1 of the 2 steps"),
        (norm_producer(4096, 4096), "128x256co1x1", SM_100A, "shared memory for 2 of the 3 steps"),
        (scaled_norm_backward(4096, 4096), "128x128co1x1", SM_100A, "matrices of e5m2 and e4m3"),
        (token_scale(4096, 4096), "128x128co2x1", SM_100A, "no mainloop"),  # two blocks share an instruction
        (token_scale(4096, 4096), "256x128co1x1", SM_100A, "no mainloop"),
        (token_scale(4096, 4096), "128x128pp1x1", SM_100A, "no mainloop"),
        (token_scale(4096, 4096), "128x128pp1x2", SM_120A, "no mainloop"),  # no clusters
        (token_scale(4096, 4096), "128x256pp1x1", SM_120A, "no mainloop"),  # 256 accumulators a thread
        (rotary(4096, 4096, 32), "128x256co1x1", SM_100A, ""),
        (swiglu(4096, 4096), "128x128pp1x1", SM_120A, ""),
    ],
)
def test_tiles_are_refused_with_a_reason(region: Any, tile: str, row: Target, reason: str) -> None:
    (config,) = tiles(tile)
    if not reason:
        legality.require(region, config, row)
        return
    with pytest.raises(Unsupported, match=reason):
        legality.require(region, config, row)


def test_an_untested_target_is_asked_for_by_name() -> None:
    for row in (SM_100A, SM_120A):
        with pytest.raises(Unsupported, match=f"not yet run on such a card.*TARGET={row.name}"):
            target.of_capability(row.capability)
        assert target.of_capability(row.capability, untested=True) is row


MIXED = """
import json, pathlib, sys
from codegen_cases import norm_producer, rotary_neighbours, summed, swiglu
from coda_inductor.codegen import source
from coda_inductor.codegen.device_sm100 import _Lanewise
from coda_inductor.codegen.target import SM_100A, TARGETS
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels.kernel import Compiled
from coda_inductor.kernels.module import load_module
from quack.epilogue.math import F2
place = pathlib.Path(sys.argv[1])
found = {name: [] for name in TARGETS}
for name, row in TARGETS.items():
    for make in (norm_producer, swiglu, summed, rotary_neighbours):
        text = source.render(make(256, 64), row)
        epilogue = load_module(text, source.module_name(text), place).epilogue
        kinds = tuple((n, "c" if n == "c" else epilogue.ops[n].fn_port) for n in epilogue.operand_names)
        minted = epilogue._mint(kinds, row.capability[0], make in (swiglu, rotary_neighbours), False, (), 0, (), False)
        found[name].append([c.__name__ for c in minted.__mro__])
class Plain:
    _epi_mod_fn = staticmethod(lambda acc, c, s: {"D": acc * 2 + c, "r0": (acc, c * s)})
class Lanes(_Lanewise, Plain):
    pass
found["lanes"] = [Lanes()._epi_mod_fn(F2(1.0, 10.0), c=F2(0.5, 0.25), s=4.0), Lanes()._epi_mod_fn(1.0, c=0.5, s=4.0)]
try:
    Compiled(norm_producer(256, 64), SM_100A.heavy[0], place, target=SM_100A)
except Unsupported as why:
    found["refusal"] = str(why)
print(json.dumps(found))
"""


@needs_compiler
def test_kernels_overlap_only_where_the_row_says_so(tmp_path: Path) -> None:
    """By what their classes are made of, whatever is multiplied. Two values at once are what each is alone. A process
    compiles for its own target only, else a kernel of one machine would lie where another's is looked for."""
    here = environment(**dict(pair.split("=") for pair in SM_90A.environment))
    command = [sys.executable, "-c", MIXED, str(tmp_path)]
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, row in TARGETS.items():
        for classes in found[name]:
            assert ("_Overlapping" in classes) == row.overlaps
            assert f"GemmSm{row.capability[0] * 10}" in classes
            assert ("_Padded" in classes) == ("_Lanewise" in classes) == (row.mainloop == "tcgen05")
    assert found["lanes"][0] == {"D": [2.5, 20.25], "r0": [[1.0, 10.0], [2.0, 1.0]]}
    assert found["lanes"][1] == {"D": 2.5, "r0": [1.0, 2.0]}
    assert "this process compiles for sm_90a, not for sm_100a" in found["refusal"] and not [*tmp_path.rglob("*.o")]
