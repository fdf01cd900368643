"""The same again: of processes with one cache, and under torch.use_deterministic_algorithms whatever the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import blank_outputs, random_inputs, token_scale
from compiling import pretend
from processes import python

from coda_inductor.codegen import legality
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.kernels import launch, record, store
from coda_inductor.measure import tune

SCRIPT = """
import hashlib, sys
import pytest, torch
import compiling
from compiling import half, pretend, run, streams
from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from pathlib import Path

class InTiles(compiling.Interpreted):
    '''What a tile's own order of adding up does to the bits.'''
    def __call__(self, inputs, outs):
        super().__call__(inputs, outs)
        for out in outs:
            if out is not None:
                out += (self.config.tile_m + 3 * self.config.tile_n + self.config.pingpong) * out.abs().mean() * 2e-6

patch, clock = pytest.MonkeyPatch(), sys.argv[2]
torch.use_deterministic_algorithms(sys.argv[3] == "fixed")
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False  # ours alone is shared
pretend(patch, Path(sys.argv[1]), InTiles)

def timed(calls, rounds, **how):
    '''The first of two ways wins, and of tiles that which the clock wants.'''
    assert sys.argv[3] != "fixed"
    for call in calls:
        call()
    times = range(1, len(calls) + 1) if clock == "first" or len(calls) == 2 else range(len(calls), 0, -1)
    return [Times(ms, ms) for ms in times]

patch.setattr(timing, "compared", timed)
ran = run(half(torch.bfloat16), *streams(torch.bfloat16))
assert ran == [], ran
print(sum(ran.regions), hashlib.sha256(ran.output.float().numpy().tobytes()).hexdigest())
"""


def bits(*processes: tuple[Path, str, str]) -> list[str]:
    """The number of Regions and the digest of a model's output, as processes give them one after the other: by which
    cache of ours, how their clocks run, and "fixed" under torch's switch. Inductor's caches are off."""
    found = []
    for cache, clock, how in processes:
        done = python(SCRIPT, str(cache), clock, how)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout.splitlines()[-1])
    return found


def test_processes_give_the_same_bits(tmp_path: Path) -> None:
    """With one cache whatever their clocks say, and under torch's switch whatever the cache. Else they choose other
    kernels."""
    a, b, c = (tmp_path / name for name in "abc")
    first, again, other = bits((a, "first", "free"), (a, "last", "free"), (b, "last", "free"))
    assert first == again != other and not first.startswith("0 ")
    measured, empty = bits((b, "last", "fixed"), (c, "first", "fixed"))
    assert measured == empty and not empty.startswith("0 ")


def test_the_switch_is_part_of_what_caches_key_on() -> None:
    free = JointPass(Settings.read({})[0])
    try:
        torch.use_deterministic_algorithms(True)
        fixed = JointPass(Settings.read({})[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert fixed.settings.deterministic and not fixed.settings.measures
    assert free.settings.measures and free.uuid() != fixed.uuid()


def test_a_graph_of_the_switch_runs_in_unmeasured_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where records tell of better ones, and in a process that has used those."""
    pretend(monkeypatch, tmp_path)
    region, size = token_scale(256, 64), 1024
    directory = store.open_store(str(tmp_path))
    first, *_, last = legality.candidates(region, size)
    assert record.remember(directory, region, size, last, 1.0, []) == last
    inputs = random_inputs(region, size, "cpu")
    chosen = []
    for measured in (True, False):
        kernel = launch.kernel(region.text, str(tmp_path), measured=measured)
        kernel(inputs, blank_outputs(region, size, "cpu"))
        chosen.append(kernel.config(size))
    assert chosen == [last, first]


def test_who_measures_at_once_runs_what_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes tune one Region: the second's own winner is not what the record says."""
    pretend(monkeypatch, tmp_path)
    region, size = token_scale(256, 64), 1024
    directory = store.open_store(str(tmp_path))
    inputs = random_inputs(region, size, "cpu")
    kernel = launch.kernel(region.text, str(tmp_path))
    kernel(inputs, blank_outputs(region, size, "cpu"))  # before anything is known, in the first
    *_, last = legality.candidates(region, size)
    whole = tune.measure

    def meanwhile(*args: Any, **how: Any) -> Any:
        record.remember(directory, region, size, last, 1.0, [])
        return whole(*args, **how)

    monkeypatch.setattr(tune, "measure", meanwhile)
    assert tune.tune(region, inputs, str(tmp_path)).config == last == kernel.config(size)
