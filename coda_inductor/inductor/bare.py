"""Products with nothing beside them, of BARE_LEAST and more in all three sizes, as Regions: there a generated kernel
may multiply faster than cuBLAS, weights' gradients among them, whose left operand lies as [K, M].

They are looked for when all other Regions are in the graph. Each is timed against the product as Inductor calls it, by
the rules of every contest, and where it loses the product stays.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.codegen import launch, legality, prebuild, record, store, target, timing, tune
from coda_inductor.codegen.ahead import Ahead
from coda_inductor.codegen.tiles import BARE_LEAST
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPE_NAMES, Product, Region, Store
from coda_inductor.core.settings import Settings
from coda_inductor.core.verify import verify
from coda_inductor.inductor.emit import ORIGIN
from coda_inductor.inductor.ops import REGION
from coda_inductor.inductor.outcome import outcome_of, recorded, sure, timed, wins
from coda_inductor.inductor.unmeasured import foreseen, unmeasured
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.rewrite.program import TRANSPOSES

log = logging.getLogger("coda_inductor.contest")

Found = dict[fx.Node, tuple[Region, tuple[fx.Node, fx.Node]]]
"""Products, each as a Region and the two tensors that it reads."""
Slower = Callable[[Found], dict[fx.Node, str]]
"""Which of these products stay as they are, and why."""
NONE_SLOWER: Slower = lambda found: {}  # noqa: E731
BARE = "bare"
"""The kind of these Regions; their nodes bear it as a mark."""
PITCH = 8  # elements of 16 bits at whose multiples rows start
ROUNDS = 25


def bare_products(
    graph: fx.Graph, legal: Callable[[Region], None], device: torch.device
) -> tuple[Found, dict[fx.Node, str]]:
    """The products on a device that may be bare Regions, and those of that size that may not, with the reason. `legal`
    raises Unsupported for one that the target cannot run."""
    found, refused = Found(), dict[fx.Node, str]()
    for node in graph.nodes:
        if (made := as_region(node)) is None or node.meta["val"].device != device:
            continue
        try:
            legal(made[0])
            found[node] = made
        except Unsupported as why:
            refused[node] = why.what
    return found, refused


def as_region(node: fx.Node) -> tuple[Region, tuple[fx.Node, fx.Node]] | None:
    """A product as a bare Region and the tensors that it reads. None if it is smaller, or if these are none that a
    kernel can load."""
    if node.target not in (aten.mm.default, aten.mm.dtype):
        return None
    x, w = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    sizes = [*node.meta["val"].shape, x.meta["val"].shape[1]]
    if not all(isinstance(n, int) and n >= BARE_LEAST and n % PITCH == 0 for n in sizes):
        return None
    left, right = in_rows(x), in_rows(w)
    dtype, out = (DTYPE_NAMES.get(n.meta["val"].dtype) for n in (x, node))
    if left is None or right is None or left is right or not g.dense(node) or not dtype or not out:
        return None
    product = Product("acc0", 0, 1, sizes[2], "kn" if right is w else "nk", a_layout="mk" if left is x else "km")
    return verify(Region(sizes[1], dtype, (product,), (), (), (Store("acc0", out),), ())), (left, right)


def in_rows(node: fx.Node) -> fx.Node | None:
    """The tensor in rows that a matrix of known sizes is, or is the transpose of. None if there is none, or if its rows
    overlap or do not start at multiples of 16 bytes."""
    base = node.args[0] if node.target in TRANSPOSES else None
    for each in (node, base):
        value = g.tensor(each)
        if value is None or value.dim() != 2:
            continue
        numbers = [*value.stride(), value.storage_offset(), value.shape[1]]
        if not all(isinstance(n, int) for n in numbers) or value.stride(1) != 1:
            continue
        turned = each is node or value.stride() == node.meta["val"].stride()[::-1]  # and no permute(0, 1)
        starts = value.stride(0) % PITCH == value.storage_offset() % PITCH == 0
        return each if turned and starts and value.stride(0) >= value.shape[1] else None  # type: ignore[return-value]
    return None


def write_bare(graph: fx.Graph, target_name: str, found: Found) -> list[fx.Node]:
    """Puts the Regions in the products' place; their results."""
    outputs = []
    for node, (region, inputs) in found.items():
        with graph.inserting_before(node):
            made = graph.call_function(REGION, ([*inputs], region.text, target_name))
            out = graph.call_function(operator.getitem, (made, 0))
        for new, value in ((made, [node.meta["val"]]), (out, node.meta["val"])):
            new.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta} | {"val": value}
        made.meta[BARE] = True
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        outputs.append(out)
    return outputs


class BareContest:
    """Times bare products against cuBLAS. What was found is kept on disk by content, as by every contest."""

    def __init__(self, settings: Settings, rows: list[dict[str, Any]], failed: Callable[[Exception], None]) -> None:
        """`rows` takes the records, `failed` what could not be measured."""
        self.settings, self.rows, self.failed = settings, rows, failed
        self._ahead = Ahead(settings.cache_dir)

    def __call__(self, found: Found) -> dict[fx.Node, str]:
        """The products that stay with cuBLAS, and why."""
        if self.settings.tune == "off":
            return {}
        directory = store.open_store(self.settings.cache_dir)
        alike = dict[str, list[fx.Node]]()
        for node, (region, inputs) in found.items():
            alike.setdefault(key(node, region, inputs), []).append(node)
        known = {name: store.read_record(directory, name, timed) for name in alike}
        new = [found[nodes[0]][0] for name, nodes in alike.items() if known[name] is None]
        self._ahead.begin(job for region in new for job in jobs(region))
        losers = dict[fx.Node, str]()
        for name, nodes in alike.items():
            region, inputs = found[nodes[0]]
            try:
                row = known[name] or store.write_record(directory, name, self.measure(nodes[0], region, inputs), timed)
            except Exception as error:
                if not foreseen(error):
                    raise
                failure = unmeasured(error, nodes[0])
                self.failed(failure)
                losers |= dict.fromkeys(nodes, failure.what)
                continue
            log.info("%s: %s", region.digest, ", ".join(f"{k} {v:.4f}" for k, v in row.items() if k.endswith("ms")))
            self.rows.append(row)
            if loses := outcome_of(1, row).loses:
                losers |= dict.fromkeys(nodes, loses)
        return losers

    def measure(self, node: fx.Node, region: Region, inputs: tuple[fx.Node, fx.Node]) -> dict[str, Any]:
        """Tunes the kernel, then times both."""
        self._ahead.wait(jobs(region))
        device = node.meta["val"].device
        with torch.no_grad(), unset_fake_temporarily(), torch.cuda.device(-1 if device.index is None else device.index):
            given = [sample(n.meta["val"]) for n in inputs]
            kernel, size = launch.kernel(region.text, self.settings.cache_dir), legality.bucket(region.m(given))
            if record.remembered(kernel.directory, region, size) is None:
                tune.tune(region, given, self.settings.cache_dir)
            outs = tune.outputs(region, given)
            calls = [lambda: kernel(given, outs), multiply(region, given, torch.empty_like(outs[0]))]
            decided = lambda turns: not wins(turns) or sure(turns)  # noqa: E731
            times = timing.compared(calls, ROUNDS, decided=decided)
            return {"m": region.m(given), **recorded([region.digest], times)}


def key(node: fx.Node, region: Region, inputs: tuple[fx.Node, fx.Node]) -> str:
    """What the outcome depends on."""
    lying = [(tuple(n.meta["val"].shape), n.meta["val"].stride()) for n in inputs]
    where = record.device_name(), record.sources_digest(), sorted(target.versions().items())
    parts = repr((region.text, lying, where))
    return "bare-" + hashlib.sha256(parts.encode()).hexdigest()[:24]


def jobs(region: Region) -> Iterator[prebuild.Job]:
    """The kernels that tuning will ask for."""
    return (prebuild.Job(region, config) for config in legality.candidates(region, BARE_LEAST))


def sample(like: Tensor) -> Tensor:
    """Random numbers that lie as a fake tensor does."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return out.normal_(std=like.shape[-1] ** -0.5)


def multiply(region: Region, inputs: list[Tensor], out: Tensor) -> Callable[[], object]:
    """The product as Inductor calls it."""
    product = region.products[0]
    a = inputs[0] if product.a_layout == "mk" else inputs[0].t()
    b = inputs[1] if product.b_layout == "kn" else inputs[1].t()
    if out.dtype == a.dtype:
        return lambda: torch.mm(a, b, out=out)
    return lambda: torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
