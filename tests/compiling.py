"""What the tests of torch.compile share: a small model, what it returns and says, and a machine that is pretended."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.codegen import target
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import CodaWarning
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import launch, prebuild
from coda_inductor.kernels.executable import Run
from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from coda_inductor.tuning import benchmark

TOKENS, WIDTH, INNER = 320, 64, 128


class Norm(nn.Module):
    """RMSNorm, spelled out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Half(nn.Module):
    """From attention's output to the end of a Llama layer: four products, a norm, two residuals, SwiGLU."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.o, self.norm = nn.Linear(width, width, bias=False), Norm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, attention: Tensor, residual: Tensor) -> Tensor:
        h = residual + self.o(attention)
        x = self.norm(h)
        return h + self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def fake_values(graph: fx.Graph) -> None:
    """Makes the values that tracing noted fake ones, as Inductor has them."""
    with FakeTensorMode() as mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = mode.from_tensor(node.meta["val"])


def half(dtype: torch.dtype = torch.float64) -> Half:
    torch.manual_seed(0)
    return Half().to(dtype)


def streams(dtype: torch.dtype = torch.float64, tokens: int = TOKENS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Attention's output and the residual stream."""
    torch.manual_seed(1)
    return torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)


class Ran(list[str]):
    """The texts of our warnings in one run, its output, and the reports of the rewrites that happened in it."""

    output: Any
    reports: list[Report]

    @property
    def regions(self) -> list[int]:
        return [len(report.sites) for report in self.reports]


def run(model: Callable[..., Any], *args: Any, backend: Any = "coda", grad: bool = False, **compile_with: Any) -> Ran:
    """Compiles and calls. Nothing that Dynamo or Inductor remembers from before is used."""
    torch._dynamo.reset()
    REPORTS.clear()
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        output = torch.compile(model, backend=backend, **compile_with)(*args)
    ran = Ran(str(w.message) for w in caught if issubclass(w.category, CodaWarning))
    ran.output, ran.reports = output, list(REPORTS)
    return ran


REFERENCE: dict[str, Any] = {"target": "reference"}


HERE = "compiling.py:"
"""Where every graph of `half` comes from."""
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def close(found: Tensor, wanted: Tensor) -> None:
    """Relative, Frobenius."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.stride() == wanted.stride()
    difference = (found.double() - wanted.double()).norm()
    assert not found.numel() or float(difference / wanted.double().norm()) < CLOSE[wanted.dtype]


def left_to_inductor(said: str, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, **compile_with: Any) -> Ran:
    """The model runs twice, right, without Regions, with one warning that contains `said`."""
    model, x = half(dtype), streams(dtype, tokens)
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, **compile_with)
    close(ran.output, wanted)
    assert ran.regions in ([], [0]) and len(ran) == 1
    assert ran[0].startswith("coda_inductor: ") and "left to Inductor: " in ran[0] and said in ran[0]
    assert ran[0].endswith(")")  # the hint
    assert run(model, *x, **compile_with) == []
    return ran


def raised(
    monkeypatch: pytest.MonkeyPatch, *said: str, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS
) -> str:
    """What is raised under STRICT: the failure, readable through Dynamo."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    with pytest.raises(BackendCompilerFailed) as caught:
        run(half(dtype), *streams(dtype, tokens))
    text = str(caught.value)
    assert text.startswith("backend='coda' raised:\n") and all(s in text for s in said), text
    return text


class Interpreted:
    """Stands in for a compiled kernel: the interpreter."""

    stack = 0

    def __init__(
        self, region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A
    ) -> None:
        self.region, self.config = region, config

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run:
        return lambda entrance, way_out: self(inputs, outs)

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        for out, value in zip(outs, interpret(self.region, inputs), strict=True):
            if out is not None:
                out.add_(value) if self.region.adds else out.copy_(value)


def begun(
    jobs: Iterable[prebuild.Job], cache_dir: str, *, over: threading.Event | None = None
) -> dict[prebuild.Job, Future[prebuild.Outcome]]:
    """Stands in for prebuild.begin: all is built."""
    made: dict[prebuild.Job, Future[prebuild.Outcome]] = {job: Future() for job in jobs}
    for future in made.values():
        future.set_result(prebuild.Outcome("", 0.0))
    return made


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contest has Inductor compile, runs as it is: that took half of the time of such tests."""
    monkeypatch.setattr(benchmark, "_compile", lambda module, *_: module)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    build: Callable[..., Any] = Interpreted,
    *,
    inductor: bool = False,
) -> None:
    """A machine that generates kernels, on the CPU: all but the compiler and the clock is real, and what a contest has
    `inductor` compile, if told: the model itself is compiled anyway. Fused always wins."""

    def timed(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[Times]:
        for call in calls:
            call()
        return [Times(1.0 + i, 1.0 + i) for i in range(len(calls))]

    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(directory / "kernels"))
    monkeypatch.setattr(joint_pass, "DEVICE", "cpu")
    monkeypatch.setattr(target, "capability", lambda device=None: (9, 0))
    monkeypatch.setattr(target, "installed", lambda package: "4.8.1" if "cutlass" in package else "0.6.5")
    monkeypatch.setattr(target, "MODULES", ())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor reports
    monkeypatch.setattr(prebuild, "begin", begun)
    monkeypatch.setattr(prebuild, "warm_up", lambda *target: None)
    monkeypatch.setattr(timing, "compared", timed)
    monkeypatch.setattr(timing, "launching", lambda calls: [0.0] * len(calls))
    monkeypatch.setattr(timing, "by_turns", lambda calls, rounds, launching: [1.0] * len(calls))
    if not inductor:
        uncompiled(monkeypatch)
    monkeypatch.setattr(launch, "KERNELS", {})
    made = types.SimpleNamespace(Compiled=build)
    door = types.SimpleNamespace(import_module=lambda name: made)
    monkeypatch.setattr(launch, "importlib", door)
    launch.LAUNCHES.clear()
    launch.FALLBACKS.clear()


class Centred(nn.Module):
    """A GPT-style layer without attention: two LayerNorms, biases, tanh and GELU."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.first, self.v, self.o = nn.LayerNorm(width), nn.Linear(width, 96), nn.Linear(96, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.o(torch.tanh(self.v(self.first(x))))
        return h + self.down(nn.functional.gelu(self.up(self.second(h))))  # type: ignore[no-any-return]
