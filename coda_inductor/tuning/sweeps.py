"""Tuning of Sweeps, by the rules of outcome.py: each against what Inductor compiles of the same nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from coda_inductor.codegen import target
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES
from coda_inductor.core.sweep import Sweep, interpret_sweep, shape, some_rows
from coda_inductor.kernels import prebuild, record, store
from coda_inductor.kernels.sweep_launch import SweepLaunch, sweep_launch
from coda_inductor.measure import free_memory, timing
from coda_inductor.measure.tune import TOLERANCE
from coda_inductor.passes.sweeps import work
from coda_inductor.plan.layout import in_order
from coda_inductor.plan.sweeps import Swept
from coda_inductor.schedule.hints import hint
from coda_inductor.tuning.benchmark import Programs
from coda_inductor.tuning.extract import described
from coda_inductor.tuning.footprint import of_nodes
from coda_inductor.tuning.group import sample
from coda_inductor.tuning.measurements import ROUNDS
from coda_inductor.tuning.outcome import recorded, sure, timed, wins
from coda_inductor.tuning.tuner import Tuner

CHECKED = 1024  # rows that are compared at a time
ROUNDED = 2e-2  # relative: bfloat16 rounds by 2e-3 at most, and the user's operations do so at each step


class SweepTuner:
    """Times Sweeps. What was found is kept on disk by content, as of all measurements."""

    def __init__(self, tuner: Tuner) -> None:
        """`tuner` decided on the graph's Regions; the rows are added to its."""
        self.tuner, self.settings = tuner, tuner.settings
        self._programs = Programs()

    def __call__(self, found: list[Swept]) -> dict[int, str]:
        """The Sweeps, by index, that stay with Inductor, and why. Layers are alike."""
        alike, losers = dict[str, list[int]](), dict[int, str]()
        for i, made in enumerate(found):
            try:
                alike.setdefault(key(made.sweep, program(made)[0]), []).append(i)
            except Unsupported as why:  # of a size that is not known
                losers[i] = self.tuner.left(made.outputs[0], why)
        self.begin({name: found[i].sweep for name, (i, *_) in alike.items()})
        for name, places in alike.items():
            made = found[places[0]]

            def row(name: str = name, made: Swept = made) -> dict[str, Any]:
                return self.row(name, made)

            if loses := self.tuner.loses(made.outputs[0], f"sweep {made.sweep.digest}", row):
                losers |= dict.fromkeys(places, loses)
        return losers

    def begin(self, sweeps: dict[str, Sweep]) -> None:
        """Begins to compile the kernels of those that nothing on disk tells of, by name."""
        if self.settings.measures:
            new = [sweep for name, sweep in sweeps.items() if self.known(name) is None]
            self.tuner.measurements.ahead.begin(map(prebuild.SweepJob, new))

    def known(self, name: str) -> dict[str, Any] | None:
        """What was measured before."""
        return store.read_record(store.open_store(self.settings.cache_dir), name, timed)

    def row(self, name: str, made: Swept) -> dict[str, Any]:
        """What was measured, and is kept under that name; nothing if nothing is to be."""
        kernel = sweep_launch(made.sweep.text, self.settings.cache_dir)
        row = self.known(name) if self.settings.measures else {}
        if row is None:
            row = store.write_record(store.open_store(self.settings.cache_dir), name, self.measure(made, kernel), timed)
        kernel.build()
        return row

    def measure(self, made: Swept, kernel: SweepLaunch) -> dict[str, Any]:
        """Checks the kernel, which workers compile while Inductor compiles what it stands for, then times both."""
        graph, given = program(made)
        free_memory.require(self.tuner.measurements.device, of_nodes(given) + 3 * of_nodes(made.outputs))
        with self.tuner.measurements.real_tensors():
            tensors = [sample(n, self.tuner.measurements.device) for n in given]
            run = self._programs.compiled(graph, tensors)
            self.tuner.measurements.ahead.wait([prebuild.SweepJob(made.sweep)])
            kernel.build()
            held = dict(zip(given, tensors, strict=True))
            inputs = [
                matrix(n, held[n], width, made.inner(i))
                for i, (n, (_, width)) in enumerate(zip(made.inputs, made.sweep.inputs, strict=True))
            ]
            m, device = made.sweep.tokens(inputs[0].shape), inputs[0].device
            outs = [
                torch.full(shape(o, m), float("nan"), dtype=DTYPES[o.dtype], device=device) for o in made.sweep.outputs
            ]
            kernel(inputs, outs)
            if not (error := worst_error(made.sweep, inputs, outs)) < TOLERANCE:
                what = f"relative error {error:.1e} of sweep {made.sweep.digest}, {TOLERANCE} is allowed"
                raise Unsupported(what)
            if not (error := difference(made, outs, run(*tensors))) < ROUNDED:
                what = f"sweep {made.sweep.digest} is {error:.1e} from what it stands for, {ROUNDED} is allowed"
                raise Unsupported(what)
            calls: list[Callable[[], object]] = [lambda: kernel(inputs, outs), lambda: run(*tensors)]
            decided = lambda turns: not wins(turns) or sure(turns)  # noqa: E731
            return {
                "sweep": True,
                "m": m,
                **recorded([made.sweep.digest], timing.compared(calls, ROUNDS, decided=decided)),
            }


def key(sweep: Sweep, graph: fx.Graph) -> str:
    """What the outcome depends on."""
    where = record.device_name(), record.sources_digest(), sorted(target.versions().items())
    return "sweep-" + hashlib.sha256(repr((sweep.text, described(*graph.nodes), where)).encode()).hexdigest()[:24]


def program(made: Swept) -> tuple[fx.Graph, list[fx.Node]]:
    """What a Sweep stands for, as a graph, and the nodes whose tensors it reads: the Sweep's inputs, and what its terms
    do not depend on after all. Sizes are the hints."""
    new, copies, given = fx.Graph(), dict[fx.Node, Any](), list(made.inputs)
    needed = {*work(made), *made.outputs}
    for node in made.outputs[0].graph.nodes:
        if node in needed and node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            given.append(node)
    for node in given:
        copies[node] = new.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in made.outputs[0].graph.nodes:
        if node in needed and node not in copies:
            size = isinstance(node.meta.get("val"), torch.SymInt)
            copies[node] = hint(node.meta["val"]) if size else new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[n] for n in made.outputs))
    return new, given


def matrix(node: fx.Node, tensor: Tensor, width: int, inner: int) -> Tensor:
    """The node's tensor as the Sweep reads it."""
    tensor = tensor.permute(in_order(node))
    if inner:
        return tensor.reshape(-1, tensor.shape[-2], inner)
    return tensor.reshape(-1, width) if width else tensor.reshape(-1)


def difference(made: Swept, outs: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference (Frobenius) from what the user's operations make, which round in between."""
    errors = list[Tensor]()
    for out, value, node, output in zip(outs, wanted, made.outputs, made.sweep.outputs, strict=True):
        value = value.permute(in_order(node)) if output.extent == "tile" else value
        errors.append(_squares(out, value.reshape(out.shape)))
    squares = torch.stack(errors)
    relative = (squares[:, 0] / squares[:, 1].clamp_min(1e-60)).sqrt()
    return float("nan") if bool(relative.isnan().any()) else float(relative.max())


def worst_error(sweep: Sweep, inputs: list[Tensor], outs: list[Tensor]) -> float:
    """The largest relative error (Frobenius) of an output against the interpreter, NaN if one is NaN. Some rows at a
    time: the whole would take more memory than the operations that are replaced."""
    m = sweep.tokens(inputs[0].shape)
    errors = torch.zeros(len(outs), 2, dtype=torch.float64, device=inputs[0].device)  # squared, of wanted squared
    totals = {
        i: torch.zeros_like(outs[i], dtype=torch.float64) for i, o in enumerate(sweep.outputs) if o.extent == "feature"
    }
    for start in range(0, m, CHECKED):
        rows = torch.arange(start, min(m, start + CHECKED), device=inputs[0].device)
        for i, value in enumerate(interpret_sweep(sweep, some_rows(sweep, inputs, rows))):
            if i in totals:
                totals[i] += value
            else:
                errors[i] += _squares(outs[i][rows], value)
    for i, total in totals.items():
        errors[i] = _squares(outs[i], total)
    relative = (errors[:, 0] / errors[:, 1].clamp_min(1e-60)).sqrt()
    return float("nan") if bool(relative.isnan().any()) else float(relative.max())


def _squares(found: Tensor, wanted: Tensor) -> Tensor:
    """The squares of the error and of what is wanted, added up."""
    return torch.stack([(found.double() - wanted.double()).square().sum(), wanted.double().square().sum()])
