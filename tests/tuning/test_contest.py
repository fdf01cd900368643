"""A contest's verdict is found again only for what was measured: both programs, on this machine, by these compilers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import close, half, pretend, run, streams, uncompiled
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from trained_layers import Layer

from coda_inductor.codegen import target
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import prebuild
from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from coda_inductor.patterns.sizes import UNKNOWN, assumed, hint
from coda_inductor.plan.built import Built
from coda_inductor.tuning import group
from coda_inductor.tuning.benchmark import Programs
from coda_inductor.tuning.extract import laid_out
from coda_inductor.tuning.group import Group
from coda_inductor.tuning.measurements import Measurements
from coda_inductor.tuning.outcome import TIMED, in_bursts, outcome_of, timed
from coda_inductor.tuning.tuner import warm_up_early

WIDE = torch.randn(128, 64, dtype=torch.bfloat16)
W, V = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))
X = torch.randn(320, 64, dtype=torch.bfloat16)
T = torch.rand(320, dtype=torch.bfloat16)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The keys of the contests that were held, or found on disk."""
    pretend(monkeypatch, tmp_path, inductor=True)
    asked: list[str] = []
    say = Measurements.say

    def note(self: Measurements, key: str, found: dict[str, Any]) -> None:
        asked.append(key)
        say(self, key, found)

    monkeypatch.setattr(Measurements, "say", note)
    return asked


def first(keys: list[str], f: Callable[..., Any], *args: Tensor) -> str:
    """The key of the one contest over f."""
    keys.clear()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        assert run(f, *args).regions == [1]
    (key,) = dict.fromkeys(keys)
    return key


def silu(x: Tensor, t: Tensor) -> Tensor:
    return F.silu(F.linear(x, W)) * t[:, None]


def silu_again(y: Tensor, s: Tensor) -> Tensor:
    return F.silu(F.linear(y, V)) * s[:, None]


def silu_spelled(x: Tensor, t: Tensor) -> Tensor:
    y = F.linear(x, W)
    return y.float().div(1 + torch.exp(-y.float())).to(y.dtype) * t[:, None]


def test_names_play_no_part(keys: list[str]) -> None:
    assert first(keys, silu, X, T) == first(keys, silu_again, X.clone(), T.clone())


def test_where_its_inputs_stand_plays_no_part(keys: list[str]) -> None:
    """The stream is an input of the graph, after the weight or before it, or is made in it."""

    def added(y: Tensor, stream: Tensor) -> Tensor:
        return F.silu(F.linear(y, W)) + stream

    def turned(y: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return stream.sort(0).values, added(y, stream)

    def made(y: Tensor, stream: Tensor) -> Tensor:
        return added(y, stream.sort(0).values)

    found = {first(keys, f, X, X.clone()) for f in (added, turned, made)}
    assert len(found) == 1


def test_what_it_stands_for_is_in_the_key(keys: list[str]) -> None:
    assert first(keys, silu, X, T) != first(keys, silu_spelled, X, T)


def test_a_group_that_the_change_does_not_reach_keeps_its_key(keys: list[str]) -> None:
    """The norm's epsilon: gate, up and what makes their statistic are measured again, the last product is not."""
    found = []
    for eps in (1e-2, 1e-3):
        keys.clear()
        model = half(torch.bfloat16)
        model.norm = torch.nn.RMSNorm(64, eps, dtype=torch.bfloat16)  # type: ignore[assignment]
        with torch._inductor.config.patch(fx_graph_cache=False):
            assert run(model, *streams(torch.bfloat16)).regions == [3]
        found.append(set(keys))
    assert found[0] != found[1] and len(found[0] & found[1]) == 1


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("grad", [True])
def test_a_deeper_model_has_no_more_contests(keys: list[str], monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    """The mean of a residual stream has an addend for each layer before it: what a layer reads is the sum of all but
    its own."""
    uncompiled(monkeypatch)
    found = []
    for depth in (4, 5):
        keys.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Layer("LayerNorm", "plain", "gelu, tanh", False, True) for _ in range(depth)))
        x = torch.randn(4, 80, 64, dtype=torch.bfloat16, requires_grad=grad)
        (regions,) = run(model.bfloat16(), x, grad=grad).regions
        assert regions > 3 * depth
        found.append(len(set(keys)))
    assert found[0] == found[1]


@pytest.mark.parametrize("package", ["nvidia-cutlass-dsl", "quack-kernels", "torch"])
def test_versions_are_in_the_key(keys: list[str], monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, versions = first(keys, silu, X, T), target.versions()
    monkeypatch.setattr(target, "versions", lambda: versions | {package: "another"})
    assert first(keys, silu, X, T) != before


def test_a_group_that_turns_decide_is_timed_no_further(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The record of a loser says by turns alone, and stands."""
    pretend(monkeypatch, tmp_path)
    decided = list[bool]()

    def compared(calls: list[Any], rounds: int, **how: Any) -> list[Times]:
        if "level" in how:  # its tiles
            return [Times(1.0, 1.0)] * len(calls)
        decided.extend(how["decided"](turns) for turns in ([1.0, 1.019], [1.0, 1.02], [1.0, 1.149], [1.0, 1.15]))
        return [Times(1.0, math.inf), Times(1.019, math.inf)]

    monkeypatch.setattr(timing, "compared", compared)
    for _ in range(2):
        with torch._inductor.config.patch(fx_graph_cache=False):
            (report,) = run(silu, X, T).reports
        (row,) = report.timings
        assert not report.sites and row["ms"] == 1.0 and "busy_ms" not in row
        assert "measured hardly faster: 1000 us fused, 1019 us by Inductor" in {r.reason for r in report.refused}
    assert decided == [True, False, False, True]


@pytest.mark.usefixtures("uncached")
def test_a_group_waits_for_its_own_kernels_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first is measured while those of the second are compiled."""
    pretend(monkeypatch, tmp_path)
    made, measured = dict[prebuild.Job, Future[prebuild.Outcome]](), list[int]()

    def begin(
        jobs: list[prebuild.Job], cache_dir: str, over: threading.Event | None
    ) -> dict[prebuild.Job, Future[prebuild.Outcome]]:
        made.update((job, Future()) for job in jobs)
        for seconds, job in ((0.5, jobs[0]), (20.0, jobs[-1])) if jobs else ():  # who waits for all goes on at last
            timer = threading.Timer(seconds, done, (job.region,))
            timer.daemon = True
            timer.start()
        return made

    def done(region: Region) -> None:
        for job, future in made.items():
            if job.region == region and not future.done():
                future.set_result(prebuild.Outcome("", 0.0))

    def compared(calls: list[Any], rounds: int, **how: Any) -> list[Times]:
        measured.append(sum(future.done() for future in made.values()))
        if "level" not in how:  # the contest
            done([*made][-1].region)
        return [Times(1.0, 1.0), *([Times(2.0, 2.0)] * (len(calls) - 1))]

    def twice(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(F.linear(x, WIDE)) * t[:, None], F.silu(F.linear(x.sin(), W)) + x

    monkeypatch.setattr(prebuild, "begin", begin)
    monkeypatch.setattr(Measurements, "compile", lambda self, plan, group: None)  # it would pass the time
    monkeypatch.setattr(timing, "compared", compared)
    assert run(twice, X, T).regions == [2]
    each = len(made) // 2
    assert measured == [each, each, 2 * each, 2 * each]


@pytest.mark.usefixtures("uncached")
def test_weights_of_a_contest_lie_as_the_kernels_that_were_compiled_ahead_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever memory is given: here each tensor lies below the one before."""
    pretend(monkeypatch, tmp_path)
    room = torch.empty(1 << 22, dtype=torch.bfloat16)
    given, seen = [room.numel()], list[bool]()
    sample, inputs = group.sample, Group.inputs

    def below(node: fx.Node, device: torch.device) -> Any:
        out = sample(node, device)
        given[0] -= out.numel() + -out.numel() % 8
        return room.as_strided(out.shape, out.stride(), given[0]).copy_(out)

    def watched(self: Group, built: Built) -> list[Tensor]:
        tensors, pair = inputs(self, built), [p.b for p in built.region.products]
        seen.extend(tensors[a].data_ptr() < tensors[b].data_ptr() for a, b in itertools.pairwise(pair))
        return tensors

    monkeypatch.setattr(group, "sample", below)
    monkeypatch.setattr(Group, "inputs", watched)
    run(half(torch.bfloat16), *streams(torch.bfloat16))
    assert seen and all(seen)


@pytest.mark.usefixtures("uncached")
def test_the_compiling_process_starts_early_on_a_first_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once there is a record, a graph may come from a cache, and none is needed."""
    pretend(monkeypatch, tmp_path)
    started = list[int]()
    monkeypatch.setattr(prebuild, "warm_up", lambda *target: started.append(1))
    settings = Settings.read()[0]
    warm_up_early(settings, [X, 3])
    warm_up_early(settings, [T, X.long(), 3])  # no weights
    warm_up_early(dataclasses.replace(settings, tune="off"), [X])
    warm_up_early(dataclasses.replace(settings, target="reference"), [X])
    assert started == [1]
    assert run(silu, X, T).regions == [1]
    started.clear()
    warm_up_early(settings, [X])
    assert started == []


def test_what_is_a_record() -> None:
    """One without times in a busy GPU must have been decided by turns, by what wins today."""
    lost, won, surely = ({"regions": ["a"], "ms": 1.0, "baseline_ms": ms} for ms in (1.01, 1.03, 1.15))
    assert timed(surely) and not outcome_of(1, surely).loses and outcome_of(1, lost).loses
    for ms, loses in ((10.04, True), (10.06, False)):  # long calls win by less
        held = {"regions": ["a"], **{name: ms if "baseline" in name else 10.0 for name in TIMED}}
        assert timed(held) and bool(outcome_of(1, held).loses) is loses
    busy = {"busy_ms": 1.0, "busy_baseline_ms": 1.0}
    assert timed(lost) and timed(lost | busy) and timed(won | busy)
    assert not timed(won) and not timed(lost | {"busy_ms": 1.0}) and not timed(won | {"busy_baseline_ms": 1.0})
    assert not timed({}) and not timed(busy | {"regions": ["a"]}) and not timed(lost | {"ms": "1.0"})


@pytest.mark.parametrize(
    ("turns", "busy", "taken"),
    [
        (1.0, [1.05, 0.5, 0.6], 0.6),  # narrowly more: the median of the ratios
        (1.0, [1.021, 1.1, 1.02], 1.021),
        (1.0, [1.07], 1.07),
        (1.0, [1.019], 1.019),  # no more than equal calls differ by
        (1.0, [0.93], 0.93),
        (1.02, [1.02], 1.02),  # one time for both: by turns alone, or under a load that lasts
    ],
)
def test_what_would_undo_a_law_narrowly_takes_the_median_of_several_bursts(
    turns: float, busy: list[float], taken: float
) -> None:
    made = [[Times(turns, ms), Times(1.0, 1.0)] for ms in busy]
    assert in_bursts(lambda: made.pop(0), 0.01)[0].busy == taken and not made


@pytest.mark.usefixtures("uncached")
def test_weights_may_be_slices_of_any_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their strides are then symbols."""
    pretend(monkeypatch, tmp_path, inductor=True)
    wide = [torch.randn(128, 200, dtype=torch.bfloat16) for _ in "ab"]
    for w in wide:
        torch._dynamo.mark_dynamic(w, 1)
    ran = run(lambda x, a, b: F.silu(F.linear(x, a[:, :64])) * F.linear(x, b[:, :64]), X, *wide)
    assert ran.regions == [1] and ran == []


def test_no_contest_at_sizes_that_nobody_knows() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    unknown = env.create_unbacked_symint()
    with pytest.raises(Unsupported, match="known only when the model runs"):
        hint(unknown)
    node = fx.Graph().placeholder("x")
    with FakeTensorMode(shape_env=env):
        node.meta["val"] = torch.empty(unknown, 4)
    with pytest.raises(Unsupported, match="known only when the model runs"):
        laid_out(node)  # nor a record of one
    assert assumed(unknown) == UNKNOWN == torch._inductor.config.unbacked_symint_fallback
    assert hint(3) == assumed(3) == 3


@pytest.mark.usefixtures("uncached")
def test_what_is_of_no_known_size_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One Region of two reads a mask of as many rows as an operation found: the other is measured, and kept."""
    pretend(monkeypatch, tmp_path)

    def two(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        some = x[t.nonzero()[:, 0]]
        return silu(x, t), F.silu(F.linear(some, V))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ran = run(two, X, T)
    assert ran.regions == [1] and len(ran) == 1 and "known only when the model runs" in ran[0]
    close(ran.output[1], two(X, T)[1])


def test_the_other_side_is_inductors_default_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the modes for autotuning and CUDA graphs turn on is off where the other side is compiled."""
    modes = {k: v for k, v in torch._inductor.list_mode_options().items() if "autotune" in k or "reduce" in k}
    seen = list[dict[str, Any]]()

    def compile_fx(module: fx.GraphModule, tensors: list[Tensor], _: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return module.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    x = torch.zeros(2)
    assert Programs(Settings()).compiled(graph, [x])(x) is x
    assert modes and all(seen[0][name] is False for options in modes.values() for name in options)
