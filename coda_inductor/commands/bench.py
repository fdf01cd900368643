"""The verb `bench`: a user's own model under torch.compile's backend and under ours, in one process: time by turns and
alone, and memory. (Whether the two agree is what `diff` says: it puts the model's state back between runs.)"""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from coda_inductor.codegen import target
from coda_inductor.commands.backward import differentiable, gradient
from coda_inductor.commands.walk import leaves
from coda_inductor.commands.words import table
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch
from coda_inductor.measure import sides

Mode = Literal["infer", "train", "step"]
MODES: dict[Mode, str] = {
    "infer": "forward without gradients",
    "train": "forward and backward",
    "step": "forward, backward and AdamW",
}
BACKENDS = ("inductor", "coda")
Model = Callable[..., Any]


def bench(
    model: Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Mode,
    settings: Settings,
    case: str,
    *,
    torch_mode: str | None = None,
    seconds: float = 2.0,
    rounds: int = 3,
    said: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """One row of facts: times in ms, memory in GiB over what lies there before a call. "null" is the ratio of
    torch.compile's times to its own in a second turn: differences below it say nothing. Raises Unsupported without a
    GPU, unless the target is the reference."""
    if not torch.cuda.is_available() and settings.target != "reference":
        hint = "run it on the GPU machine, or with --target reference to try the command"
        raise Unsupported("this machine has no GPU, and both backends would be Inductor", hint=hint)
    if torch_mode and settings.target == "reference":
        raise Unsupported("torch.compile takes a mode or options, not both", hint="leave out --torch-mode or --target")
    model, args, kwargs = placed(model, args, kwargs, mode)
    work = Work(model, args, kwargs, mode)
    steps = {}
    REPORTS.clear()
    for backend in BACKENDS:
        said(f"compiling with {backend}")
        chosen = None if torch_mode else options(backend, settings)
        compiled = torch.compile(model, backend=backend, mode=torch_mode, options=chosen)
        steps[backend] = work.step(compiled)
        for _ in range(3):  # CUDA graphs are recorded in the second
            steps[backend]()
    launch.LAUNCHES.clear()
    launch.FALLBACKS.clear()
    steps["coda"]()
    launched, fallbacks = dict(launch.LAUNCHES), dict(launch.FALLBACKS)
    gib = {backend: sides.peak_gib(steps[backend]) for backend in BACKENDS}
    theirs, ours = steps["inductor"], steps["coda"]
    first, second, again = sides.compared([theirs, ours, theirs], seconds, rounds, said)
    return {
        "case": case, "mode": mode, "baseline": f"torch.compile {torch_mode or 'default'}",
        "ms": second.turns, "baseline_ms": first.turns, "speedup": first.turns / second.turns,
        "sustained": {"ms": second.alone, "baseline_ms": first.alone, "speedup": first.alone / second.alone},
        "null": first.alone / again.alone,
        "gib": gib["coda"], "baseline_gib": gib["inductor"],
        "kernels": sum(launched.values()), "regions": len(launched), "fallbacks": fallbacks,
        "lost": sorted({r.reason for seen in REPORTS for r in seen.refused if r.reason.startswith("measured ")}),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {**target.versions(), "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def placed(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Mode) -> tuple[Model, Any, Any]:
    """The model and its inputs on the GPU if there is one, in the mode that is measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(model, torch.nn.Module):
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            hint = "build it on a device: bench runs it"
            raise Unsupported("the model lies on the meta device", hint=hint)
        model.to(device).train(mode != "infer")
    moved = tree_map_only(Tensor, lambda t: t.detach().to(device).requires_grad_(t.requires_grad), (args, kwargs))
    return model, *moved


def options(backend: str, settings: Settings) -> dict[str, str | int | bool | Callable[..., Any]] | None:
    """Those of ours that differ from the environment's."""
    return {"target": settings.target} if backend == "coda" else None


class Work:
    """What is repeated: a forward, a forward and backward, or a whole step, of one set of inputs."""

    def __init__(self, model: Model, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Mode) -> None:
        self.args, self.kwargs, self.mode = args, kwargs, mode
        own = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
        given = [x for _, x in leaves("", (args, kwargs)) if isinstance(x, Tensor)]
        self.wanting = [t for t in (*own, *given) if t.requires_grad]
        if mode != "infer" and not self.wanting:
            raise Unsupported(f"--mode {mode}: nothing of the model requires a gradient")
        learnt = [t for t in own if t.requires_grad]
        if mode == "step" and not learnt:
            raise Unsupported("--mode step: the model has no parameter to train")
        fused = torch.cuda.is_available()
        self.optimizer = torch.optim.AdamW(learnt, lr=1e-5, fused=fused) if mode == "step" else None
        self.gradients: list[Tensor] | None = None

    def step(self, compiled: Model) -> Callable[[], Any]:
        """One call of the compiled model and what follows it. It returns what the model does."""

        def run() -> Any:
            with torch.set_grad_enabled(self.mode != "infer"):
                made = compiled(*self.args, **self.kwargs)
            if self.mode != "infer":
                self.backward(made)
                if self.optimizer is not None:
                    self.optimizer.step()
                for t in self.wanting:
                    t.grad = None
            return made

        return run

    def backward(self, made: Any) -> None:
        """As `backward.backward`, but the gradients are drawn once."""
        outputs = list(differentiable(made).values())
        if not outputs:
            raise Unsupported(f"--mode {self.mode}: no output of the model has a gradient")
        if self.gradients is None:
            self.gradients = [gradient(i, out) for i, out in enumerate(outputs)]
        torch.autograd.backward(outputs, self.gradients)


FORMATS = (".svg", ".png", ".pdf")


def checked(seconds: float, rounds: int, out: str | None, plot: str | None) -> None:
    """Raises Unsupported for what would fail only when all is measured."""
    if not (seconds > 0 and rounds >= 1):
        raise Unsupported(f"--seconds {seconds:g} --rounds {rounds}: nothing would be timed", hint="both are positive")
    for option, file in (("--out", out), ("--plot", plot)):
        if file and not (Path(file).absolute().parent.is_dir() and not Path(file).is_dir()):
            raise Unsupported(f"{option} {file}: no file can be written there")
    if plot and Path(plot).suffix not in FORMATS:
        raise Unsupported(f"--plot {plot}: its ending is none of {', '.join(FORMATS)}")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("--plot needs matplotlib", hint="pip install matplotlib")


def written(facts: Mapping[str, Any], file: str) -> None:
    """Appends the row to a file of JSON lines."""
    with Path(file).open("a") as out:
        out.write(json.dumps(facts) + "\n")


def plotted(facts: Mapping[str, Any], file: str) -> None:
    """Two bars, the times alone, into a file whose ending names its format."""
    from matplotlib.figure import Figure

    held = facts["sustained"]
    figure = Figure(figsize=(6, 1.8), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(["coda", facts["baseline"]], [held["ms"], held["baseline_ms"]], color=["#2a9d8f", "#8d99ae"])
    axes.bar_label(bars, fmt="%.2f ms", padding=3)
    axes.margins(x=0.15)
    axes.set_xlabel("ms, each alone")
    axes.set_title(f"{facts['case']}, {MODES[facts['mode']]}, {facts['machine']}: {held['speedup']:.3f}x", fontsize=9)
    figure.savefig(file)


def render(facts: Mapping[str, Any]) -> str:
    """The row as a table, and one sentence that says whether its difference counts."""
    held = facts["sustained"]
    gib = facts["baseline_gib"], facts["gib"]
    rows = [
        ["", "alone, ms", "by turns, ms", "memory, GiB"],
        *(
            [name, f"{alone:.3f}", f"{turns:.3f}", "-" if size is None else f"{size:.3f}"]
            for name, alone, turns, size in (
                (facts["baseline"], held["baseline_ms"], facts["baseline_ms"], gib[0]),
                ("coda", held["ms"], facts["ms"], gib[1]),
            )
        ),
    ]
    lines = [f"{facts['case']}: {MODES[facts['mode']]}, {facts['machine']}", "", *table(rows, "  "), ""]
    ratio, noise = held["speedup"], abs(facts["null"] - 1)
    lines.append(f"alone {ratio:.3f}x; two turns of torch.compile itself differ by {100 * noise:.1f} %.")
    if abs(ratio - 1) <= noise:
        lines.append("The difference is within that: it says nothing.")
    lines.append(f"{facts['kernels']} launches of {facts['regions']} kernels of ours in one call.")
    if facts["lost"]:
        lines.append(f"{len(facts['lost'])} groups of Regions lost their timing and stay with Inductor.")
    lines += [f"  {count} fell back: {why}" for why, count in facts["fallbacks"].items()]
    lines.append("Whether their results agree is what `coda-inductor diff` says.")
    return "\n".join(lines)
