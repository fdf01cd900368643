"""A compile keeps nothing of who asked for it. Dynamo's optimizer for DistributedDataParallel compiles a model bucket
by bucket, and the end of a local variable tells it that one is done: where an error that we caught kept that frame, the
next bucket failed if the collector ran in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Centred, Half, Interpreted, half, pretend, run, streams
from evaluate import strict_reference
from failing_kernels import Illegal, OutOfMemory, build_fails
from torch import Tensor, fx, nn
from torch._inductor.pattern_matcher import FailedMatch

from coda_inductor.backend import coda
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.inductor import joint_pass
from coda_inductor.kernels import prebuild

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached", "uncollected")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what nothing refers to is freed, and at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Local:
    """What a frame holds."""


class Caller:
    """A backend that calls ours. `kept` counts those of its frames that outlive the call."""

    def __init__(self) -> None:
        self.locals = list[weakref.ref[Local]]()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        local = Local()
        self.locals.append(weakref.ref(local))
        return coda(gm, inputs)

    @property
    def kept(self) -> int:
        assert self.locals
        for found in gc.get_objects():
            if type(found) is FailedMatch:  # which stock Inductor keeps as well (torch 2.15), with all frames below
                found.__traceback__ = None
        return sum(local() is not None for local in self.locals)


class Part(nn.Module):
    """What a bucket may hold: the end of one layer and the begin of the next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(width), Centred(width)

    def forward(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(attention, residual)
        return h, self.second(h)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [lambda: half(), lambda: Part(64).double()], ids=["half", "part"])
def test_a_compile_in_which_nothing_fails(make: Callable[[], nn.Module]) -> None:
    caller = Caller()
    with strict_reference(run=False):
        torch.compile(make(), backend=caller)(*streams())
    assert not caller.kept


@pytest.mark.parametrize("kind", [RuntimeError, Unsupported])
def test_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def rewrite(*_: Any) -> Any:
        raise kind("it fails")

    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setattr(joint_pass, "rewrite", rewrite)
    caller = Caller()
    assert len(run(half(), *streams(), backend=caller)) == 1
    assert not caller.kept


def second_is_built(region: Region, *how: Any, **more: Any) -> Any:
    """Of each Region the first configuration cannot be built."""
    build = Interpreted if region.digest in tried else build_fails
    tried.add(region.digest)
    return build(region, *how, **more)


tried = set[str]()
WARNED: list[tuple[Any, str, int]] = [
    (Interpreted, "quick", 0), (Interpreted, "off", 0), (build_fails, "quick", 1), (build_fails, "off", 1),
    (second_is_built, "off", 1), (OutOfMemory, "quick", 1), (Illegal, "quick", 1),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("build", "tune", "warnings"), WARNED)
def test_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Any, tune: str, warnings: int) -> None:
    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune)
    tried.clear()
    caller = Caller()
    assert len(run(half(BF16), *streams(BF16), backend=caller)) == warnings
    assert not caller.kept


@pytest.mark.parametrize("kind", [OSError, Unsupported])
def test_an_error_that_a_future_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception]) -> None:
    """No process that compiles is to be had."""
    pretend(monkeypatch, tmp_path)

    def begin(jobs: Iterable[prebuild.Job], *_: Any, **__: Any) -> dict[prebuild.Job, Future[prebuild.Outcome]]:
        future = Future[prebuild.Outcome]()
        future.set_exception(kind("no process is to be had"))
        return dict.fromkeys(jobs, future)

    monkeypatch.setattr(prebuild, "begin", begin)
    caller = Caller()
    assert len(run(half(BF16), *streams(BF16), backend=caller)) == 1
    assert not caller.kept


def test_what_was_there_is_not_walked_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it left frozen, whatever happens; what somebody else froze stays so."""
    seen, whole = list[int](), joint_pass.JointPass._rewrite

    def rewrite(self: joint_pass.JointPass, graph: fx.Graph) -> Any:
        seen.append(gc.get_freeze_count())
        if len(seen) == 2:
            raise Unsupported("as it happens")
        return whole(self, graph)

    monkeypatch.setattr(joint_pass.JointPass, "_rewrite", rewrite)
    monkeypatch.setattr(joint_pass, "MANY", 1)
    before = gc.get_freeze_count()
    with strict_reference():
        run(half(), *streams())
        assert seen[0] > joint_pass.FROZEN > gc.get_freeze_count()
        with pytest.raises(Exception, match="as it happens"):
            run(half(), *streams())
        assert gc.get_freeze_count() <= before
        gc.freeze()
        try:
            run(half(), *streams())
            assert len(seen) == 3 and gc.get_freeze_count() > joint_pass.FROZEN
        finally:
            gc.unfreeze()
