"""Tuning of plain products, by the rules of outcome.py: each against the product as Inductor calls it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from coda_inductor.codegen import legality, target
from coda_inductor.core import blocks
from coda_inductor.core.region import Region
from coda_inductor.kernels import launch, prebuild, record, store
from coda_inductor.kernels.ahead import Ahead
from coda_inductor.measure import free_memory, timing, tune
from coda_inductor.ops.custom import ADD_PRODUCT_
from coda_inductor.passes.plain import Found
from coda_inductor.tuning.footprint import of_nodes, stored
from coda_inductor.tuning.group import sample
from coda_inductor.tuning.measurements import ROUNDS
from coda_inductor.tuning.outcome import recorded, sure, timed, wins
from coda_inductor.tuning.tuner import Tuner

Pair = tuple[fx.Node, fx.Node]


class PlainTuner:
    """Times plain products against cuBLAS. What was found is kept on disk by content, as of all measurements."""

    def __init__(self, tuner: Tuner) -> None:
        """`tuner` decided on the graph's other Regions; the rows are added to its."""
        self.tuner, self.settings = tuner, tuner.settings
        self._ahead = Ahead(self.settings.cache_dir)

    def __call__(self, found: Found) -> dict[fx.Node, str]:
        """The products that stay with cuBLAS, and why."""
        if not self.settings.measures:
            return {}
        directory = store.open_store(self.settings.cache_dir)
        alike = dict[str, list[fx.Node]]()
        for node, (region, inputs) in found.items():
            alike.setdefault(key(region, inputs), []).append(node)
        known = {name: store.read_record(directory, name, timed) for name in alike}
        new = [found[nodes[0]][0] for name, nodes in alike.items() if known[name] is None]
        machine = self.tuner.measurements.target
        self._ahead.begin(job for region in new for job in jobs(region, machine))
        losers = dict[fx.Node, str]()
        for name, nodes in alike.items():
            region, inputs = found[nodes[0]]

            def row(name: str = name, region: Region = region, inputs: Pair = inputs) -> dict[str, Any]:
                if (before := known[name]) is not None:
                    self.prove(region, inputs)
                    return before
                return store.write_record(directory, name, self.measure(region, inputs), timed)

            if loses := self.tuner.loses(nodes[0], region.digest, row):
                losers |= dict.fromkeys(nodes, loses)
        return losers

    def prove(self, region: Region, inputs: Pair) -> None:
        """Where kernels must be proved on the card: raises Unsupported if the Region's may not run here."""
        if not self.tuner.measurements.target.tested:
            with self.tuner.measurements.real_tensors():
                tokens = int(inputs[0].meta["val"].numel() // region.products[0].k)
                launch.kernel(region.text, self.settings.cache_dir).build(tokens)

    def measure(self, region: Region, inputs: Pair) -> dict[str, Any]:
        """Tunes the kernel, then times both."""
        self._ahead.wait(jobs(region, self.tuner.measurements.target))
        tokens = int(inputs[0].meta["val"].numel() // region.products[0].k)
        free_memory.require(self.tuner.measurements.device, of_nodes(inputs) + 2 * stored(region, tokens))
        with self.tuner.measurements.real_tensors():
            given = [sample(n, self.tuner.measurements.device) for n in inputs]
            kernel = tune.tuned(region, given, self.settings.cache_dir, hints=False)
            outs = blocks.outputs(region, given)
            calls = [lambda: kernel(given, outs), multiply(region, given, torch.empty_like(outs[0]))]
            decided = lambda turns: not wins(turns) or sure(turns)  # noqa: E731
            times = timing.compared(calls, ROUNDS, decided=decided)
            return {"m": region.m(given), **recorded([region.digest], times)}


def key(region: Region, inputs: Pair) -> str:
    """What the outcome depends on."""
    layouts = [(tuple(n.meta["val"].shape), n.meta["val"].stride()) for n in inputs]
    where = record.device_name(), record.sources_digest(), sorted(target.versions().items())
    parts = repr((region.text, layouts, where))
    return "bare-" + hashlib.sha256(parts.encode()).hexdigest()[:24]


def jobs(region: Region, row: target.Target = target.SM_90A) -> Iterator[prebuild.Job]:
    """The kernels that tuning will ask for."""
    return (prebuild.Job(region, c, target=row.name) for c in legality.candidates(region, row.deep_least, row))


def multiply(region: Region, inputs: list[Tensor], out: Tensor) -> Callable[[], object]:
    """The product as Inductor calls it."""
    product = region.products[0]
    a = inputs[0] if product.a_layout == "mk" else inputs[0].t()
    b = inputs[1] if product.b_layout == "kn" else inputs[1].t()
    if region.adds:
        return lambda: ADD_PRODUCT_(out, a, b)
    if out.dtype == a.dtype:
        return lambda: torch.mm(a, b, out=out)
    return lambda: torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
