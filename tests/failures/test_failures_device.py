"""What a GPU, its driver and its memory may refuse, provoked as in test_failures.py: no error where there is one of
another kind, one warning, the right result, and no tensor that stays behind."""

from __future__ import annotations

import gc
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import random_inputs, token_scale
from compiling import HERE, Interpreted, close, half, left_to_inductor, pretend, raised, run, streams
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.codegen import target
from coda_inductor.core.errors import BrokenInvariant, CodaWarning, Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import joint_pass
from coda_inductor.kernels import launch
from coda_inductor.measure import timing, tune
from coda_inductor.ops import lowering
from coda_inductor.tuning import benchmark, group

BF16 = torch.bfloat16
REAL_CAPABILITY = target.capability
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, inductor=True)


# ---- the architecture


@pytest.mark.parametrize("found", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_another_architecture(pretended: None, monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
    """What torch says of the device is what is asked; a graph on the CPU stands for one on the current device."""
    cuda = types.SimpleNamespace(is_available=lambda: True, get_device_capability=lambda device: found)
    monkeypatch.setattr(target, "capability", REAL_CAPABILITY)
    importlib = types.SimpleNamespace(import_module=lambda name: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(target, "importlib", importlib)
    known = {row.capability: row for row in target.TARGETS.values()}
    said = f"kernels are generated for {target.kinds()}, found sm_{found[0]}{found[1]}"
    if found in known:
        said = f"kernels for {known[found].name} are compiled, not yet run on such a card: they are used if asked for"
    left_to_inductor(f"every graph is left to Inductor: {said}")
    raised(monkeypatch, said)


def test_of_two_gpus_the_one_that_holds_the_inputs_is_asked(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device | None] = []

    def capability(device: torch.device | None = None) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device == torch.device("cuda:1") else (8, 6)

    monkeypatch.setattr(target, "capability", capability)
    monkeypatch.setattr(joint_pass, "DEVICE", "cuda")
    with FakeTensorMode():
        mask, x, y = torch.empty(2), torch.empty(2, device="cuda:1"), torch.empty(2, device="cuda:0")
    joint_pass.machine(Settings(), [3, mask, x])
    with pytest.raises(Unsupported, match="found sm_86"):
        joint_pass.machine(Settings(), [3, mask, y])
    assert asked == [x.device, y.device]


# ---- the driver and the compiler

OLD_DRIVER = RuntimeError("None of the installed toolkit flavors (cu13) are compatible with the CUDA driver.")
"""What importing cutlass raises."""
HALF_INSTALLED = ImportError("libcute_dsl_runtime.so: cannot open shared object file: No such file or directory")
UNLOADABLE = pytest.mark.parametrize("error", [OLD_DRIVER, HALF_INSTALLED], ids=["driver", "library"])


def unloadable(monkeypatch: pytest.MonkeyPatch, directory: Path, error: Exception) -> None:
    """A machine on which the compiler is installed and cannot be imported."""

    def import_module(name: str) -> Any:
        raise error

    pretend(monkeypatch, directory)
    monkeypatch.setattr(launch, "importlib", types.SimpleNamespace(import_module=import_module))


@pytest.mark.sampled
@UNLOADABLE
@pytest.mark.parametrize("tuned", ["off", "quick"])
def test_compiler_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, tuned: str
) -> None:
    unloadable(monkeypatch, tmp_path, error)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tuned)
    said = f"the kernel compiler cannot be loaded: {type(error).__name__}: {error}"
    ran = left_to_inductor(said)
    assert ran[0].startswith("coda_inductor: a region is left to Inductor: ") and HERE in ran[0]
    assert not list((tmp_path / "kernels").rglob("*.json"))
    raised(monkeypatch, "Unsupported: ", said)


@UNLOADABLE
@pytest.mark.parametrize("strict", [False, True])
def test_launch_where_the_compiler_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, strict: bool
) -> None:
    """A graph from a warm cache, after the driver was changed."""
    unloadable(monkeypatch, tmp_path, error)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(strict)))
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 300, "cpu"), torch.empty(300, 64, dtype=BF16)
    run_region = lowering.Launcher(region.text)
    if strict:
        with pytest.raises(Unsupported, match="cannot be loaded"):
            run_region(inputs, [out])
        return
    with pytest.warns(CodaWarning, match="separate operations: .* cannot be loaded") as caught:
        run_region(inputs, [out])
        run_region(inputs, [out])
    assert len(caught) == 1 and torch.equal(out, interpret(region, inputs)[0])


def test_driver_that_refuses_what_the_compiler_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The door to the compiler is the real one; what it makes on the way is more than the driver loads."""
    kernel = pytest.importorskip("coda_inductor.kernels.kernel")
    from cutlass.base_dsl.common import DSLCudaRuntimeError

    def refuse(*_: Any, **__: Any) -> Any:
        raise DSLCudaRuntimeError(35, "cudaErrorInsufficientDriver")

    pretend(monkeypatch, tmp_path, kernel.Compiled)
    monkeypatch.setattr(kernel, "_require_compiler", lambda target: None)  # without a GPU, cutlass is for another
    monkeypatch.setattr(kernel.quack.gemm_runtime.host, "build_gemm_epi_plan", refuse)
    assert "DSLCudaRuntimeError" in left_to_inductor("cudaErrorInsufficientDriver")[0]
    raised(monkeypatch, HERE, "Unsupported: ", "cudaErrorInsufficientDriver")


# ---- memory


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def in_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs are there, with all tensors."""
    monkeypatch.setattr(timing, "compared", no_memory)


def in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third tensor that is made."""
    whole, made = group.sample, list[object]()

    def sample(node: Any, device: torch.device) -> Any:
        made.append(node)
        return no_memory() if len(made) % 3 == 0 else whole(node, device)

    monkeypatch.setattr(group, "sample", sample)


def in_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "outputs", no_memory)


def in_inductors_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.Programs, "compiled", lambda self, graph, tensors: no_memory)


def in_inductors_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries kernels, too, and wraps what they raise. Only in the contest, which compiles in a thread."""
    whole = GraphLowering.run

    def lower(self: GraphLowering, *args: Any) -> Any:
        return no_memory() if threading.current_thread() is not threading.main_thread() else whole(self, *args)

    monkeypatch.setattr(GraphLowering, "run", lower)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, int]]]:
    """How many tensors the contests have made, and how many of them are there still. No garbage is collected
    meanwhile: an allocator of GPU memory does not wait for that."""
    made: list[weakref.ref[Any]] = []

    def watched(whole: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            out = whole(*args)
            made.extend(weakref.ref(t) for t in (out if isinstance(out, list) else [out]))
            return out

        return make

    for module, name in ((group, "sample"), (tune, "outputs")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    gc.disable()
    yield lambda: (len(made), sum(ref() is not None for ref in made))
    gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("where", [in_timing, in_a_sample, in_outputs, in_inductors_program, in_inductors_compile])
def test_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
    pretended: None,
    tmp_path: Path,
    alive: Callable[[], tuple[int, int]],
    where: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Every Region is left, nothing of the contest stays in memory, and nothing is remembered of it."""
    where(monkeypatch)
    said = "out of memory while it was measured (compile before memory is filled, or CODA_INDUCTOR_TUNE=off)"
    ran = left_to_inductor(said)
    assert ran[0].startswith("coda_inductor: a region is left to Inductor: ") and HERE in ran[0]
    made, left = alive()
    assert made >= 2 and left == 0
    assert not list((tmp_path / "kernels").rglob("contest-*"))
    raised(monkeypatch, HERE, "Unsupported: ", said)


@pytest.mark.parametrize("words", ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"])
def test_out_of_memory_that_only_its_words_tell(pretended: None, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """It is not torch's allocator alone that asks for memory."""

    def fail(calls: Any, rounds: int, **how: Any) -> Any:
        raise RuntimeError(f"CUDA error: {words}")

    monkeypatch.setattr(timing, "compared", fail)
    assert "a region is left" in left_to_inductor("out of memory while it was measured")[0]


@pytest.mark.parametrize(("size", "kept"), [(0, []), (10, [1])])
def test_what_inductor_cannot_compile_alone(
    pretended: None,
    monkeypatch: pytest.MonkeyPatch,
    alive: Callable[[], tuple[int, int]],
    size: int,
    kept: list[int],
) -> None:
    """What a contest cuts out may fail where the whole graph does not: that Region is left, and the others stay."""
    whole, failed = GraphLowering.run, list[str]()

    def lower(self: GraphLowering, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and len(self.graph.nodes) > size:
            failed.append(str(self.graph))
            raise NotImplementedError("provoked")
        return whole(self, *args)

    monkeypatch.setattr(GraphLowering, "run", lower)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert [len(s.region.products) for r in ran.reports for s in r.sites] == kept
    assert len(ran) == 1 and ran[0].startswith("coda_inductor: a region is left to Inductor: ") and HERE in ran[0]
    assert "Inductor fails on what is to be measured: InductorError: NotImplementedError: provoked" in ran[0]
    made, left = alive()
    assert made >= 2 and left == 0
    assert failed and len(failed) == len({*failed})  # each is tried once
    raised(monkeypatch, HERE, "Unsupported: ", "Inductor fails on what is to be measured: ", "provoked")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AssertionError(),
            "a region is left .*: Inductor fails on what is to be measured: AssertionError:",
        ),
        (BrokenInvariant("provoked"), "a graph is left to Inductor: .*: provoked"),
    ],
)
def test_what_fails_before_inductor_does(
    pretended: None, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """An error without words is named; one of ours is a bug, and said to be one."""

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(benchmark, "_compile", fail)
    (warning,) = left_to_inductor("")
    assert re.search(said, warning)


def test_memory_for_some_regions_and_not_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What could be measured stays; with more memory the rest is measured again, and what is on disk is not."""

    class Large(Interpreted):
        def __call__(self, inputs: Any, outs: Any) -> None:
            if len(self.region.products) == 2:
                no_memory()
            super().__call__(inputs, outs)

    pretend(monkeypatch, tmp_path, Large)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and "out of memory" in ran[0]
    (report,) = ran.reports
    assert report.sites and all(len(s.region.products) == 1 for s in report.sites)
    assert any("out of memory" in r.reason for r in report.refused)
    pretend(monkeypatch, tmp_path)
    ran = run(model, *x)
    assert ran == [] and [len(s.region.products) for s in ran.reports[0].sites] == [1, 2, 1]


def test_without_a_contest_no_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the warning proposes helps."""

    pretend(monkeypatch, tmp_path, inductor=True)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    for where in (in_timing, in_a_sample, in_outputs, in_inductors_compile):
        where(monkeypatch)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions == [3]
