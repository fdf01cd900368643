"""What coda-inductor does to a model, and what it leaves to Inductor: counted on the graphs alone, no GPU, nothing run.

`explain` returns the facts (the JSON form of the `explain` command, schema 1); `render` is their text. `Account` adds
them up graph by graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from coda_inductor.core.dtypes import DTYPES, EIGHT_BITS
from coda_inductor.core.elementwise import told
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.text import left, right
from coda_inductor.explain.account import attribute, smallest_tile, touched, touches_tile
from coda_inductor.explain.capture import capture
from coda_inductor.explain.estimate import estimates
from coda_inductor.explain.modules import Modules, grouped, together
from coda_inductor.explain.offline import rewritten, target_of
from coda_inductor.explain.report import NOTHING, render
from coda_inductor.explain.rewriting import Rewriting
from coda_inductor.explain.units import PRODUCTS, Facts, kernel_facts, operation, site_facts
from coda_inductor.inductor.records import Refusal, Report, Site
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.patterns.graph import is_backward, is_row
from coda_inductor.rewrite.state import BATCHED
from coda_inductor.schedule.kinds import elements, kind_of, owner
from coda_inductor.schedule.model import Kernel, kept_bytes, kernels, partition

__all__ = ["explain", "explain_graph", "render"]

TOTALS = (
    "bytes_before", "bytes_after", "bytes_epilogues", "passes_left", "saved_bytes", "saved_bytes_inductor", "regions",
    "kernels_before", "kernels_after",
)  # fmt: skip
"""What is summed over graphs. bytes_epilogues: of bytes_after, what is no kernel's of its own."""


Rewrite = Callable[[fx.Graph, Any], Report]


def explain(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Any,
    rewrite: Rewrite | None = None,
) -> Facts:
    """The facts about every graph of model(*args, **kwargs), and their totals. Tests give another `rewrite`."""
    account = Account(settings)
    capture(model, args, kwargs, mode, lambda graph: account.add(graph, rewrite or Rewriting()), settings)
    return account.facts(mode)


@dataclasses.dataclass(slots=True)
class Account:
    """The facts of a model's graphs so far, and what each adds to the totals."""

    settings: Any
    graphs: list[Facts] = dataclasses.field(default_factory=list)
    counted: list[Facts] = dataclasses.field(default_factory=list)

    def add(self, graph: fx.Graph, rewrite: Rewrite) -> None:
        """One more graph, which is rewritten in place."""
        facts, totals = explain_graph(graph, self.settings, rewrite)
        self.graphs.append(facts)
        self.counted.append(totals)

    def facts(self, mode: Literal["infer", "train"]) -> Facts:
        """The whole report, of graphs that were captured in a mode."""
        sums: Counter[str] = Counter()
        for totals in self.counted:
            sums.update(totals)
        covered = sums.pop("covered", 0)
        before, after = sums["bytes_before"], sums["bytes_after"]
        totals = {name: sums[name] for name in TOTALS} | {"coverage": covered / before if before else 0.0}
        target = target_of(self.settings) if self.settings else "reference"
        guessed = estimates(before, after, target)
        facts: Facts = {"schema": 1, "mode": mode, "target": target, "graphs": self.graphs, "totals": totals}
        return facts | {"estimates": guessed}


def explain_graph(graph: fx.Graph, settings: Any, rewrite: Rewrite) -> tuple[Facts, Facts]:
    """One graph, which is rewritten in place: its facts, and what it adds to the totals ("covered" in bytes). The
    modules of its Regions' products are known if `rewrite` is a Rewriting."""
    modules = Modules.of(graph)
    halves = partition(graph)
    before = kernels(graph, halves)
    touches = [touch for kernel in before for touch in touched(kernel)]
    saved_before = kept_bytes(halves)
    smallest = smallest_tile(graph)
    try:
        report = rewrite(graph, settings)
    except Unsupported as why:
        report = Report(refused=(Refusal("", str(why), why.where),))
    graph = rewritten(graph)
    halves = partition(graph)
    after = kernels(graph, halves)
    share = attribute(touches, [*report.sites, *report.casts, *report.masks, *report.grouped])
    nodes = {n.name: n for n in graph.nodes}
    regions = [region_facts(site, nodes, share.get(site.name, 0), settings) for site in report.sites]
    derived = rewrite.derived.products() if isinstance(rewrite, Rewriting) and rewrite.derived else []
    for i, (site, region) in enumerate(zip(report.sites, regions, strict=True)):
        plain = [nodes[name] for name in site.outputs if name in nodes]  # those come after what was derived
        region |= module_facts(derived[i] if i < len(derived) else plain, modules)
    large = [k for k in after if touches_tile(k, smallest)]
    left = sorted((k for k in large if k.nodes[0].target is not ELEMENTWISE), key=lambda k: -k.bytes)
    chains = [refusal(kernel, report) for kernel in left]
    facts: Facts = {
        "kind": "joint" if halves else "inference",
        "regions": regions,
        "groups": grouped(regions),
        "passes": [pass_facts(k, c, modules) for k, c in zip(left, chains, strict=True)],
        "refused": ([] if declined(report) else chains) + lone(report, nodes, chains),
        "tables": [{"node": t.node, "shape": t.shape, "source": t.source} for t in report.tables],
        "elementwise": [
            {"shape": f"[{p.m}, {p.record.n}]", "what": told(p.record), "outputs": list(p.outputs), "source": p.source}
            for p in report.elementwise
        ],
        "blocks": [dataclasses.asdict(b) for b in report.blocks],
        "masks": [{"node": m.node, "shape": m.shape, "hides": m.hides, "source": m.source} for m in report.masks],
        "grouped": [
            {"node": a.node, "shape": a.shape, "heads": a.heads, "what": a.what, "source": a.source}
            for a in report.grouped
        ],
        "casts": [{"node": c.node, "shape": c.shape, "what": c.what, "source": c.source} for c in report.casts],
    }
    beside = sum(r["bytes_after"] for r in regions)
    totals: Facts = {
        "bytes_before": sum(k.bytes for k in before),
        "bytes_after": sum(k.bytes for k in after) + beside,
        "bytes_epilogues": beside,
        "covered": sum(share.values()),
        "passes_left": len(large),
        "saved_bytes": kept_bytes(halves),
        "saved_bytes_inductor": saved_before,
        "regions": len(regions),
        "kernels_before": len(before),
        "kernels_after": len(after),
    }
    return with_reason(facts), totals


def region_facts(site: Site, nodes: Mapping[str, fx.Node], bytes_before: int, settings: Any) -> Facts:
    """What the user sees of one region. bytes_after: its loads and stores beyond one output tile per product."""
    region, n = site.region, site.region.n
    rows = rows_of(site, nodes)
    width, head = region.width, 2 * region.half
    shapes = {"token": f"[{site.m}]", "feature": f"[{width}]", "tile": f"[{site.m}, {n}]"}
    shapes |= {"table": f"[{site.m}, {head}]", "sample": f"[{n}] of a sample"}
    wide = "f64" if region.dtype == "f64" else "f32"
    size = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    loads = sum(math.prod(region.shape(o, rows)) * size[o.dtype] for o in region.operands)
    sums = [
        shapes["token"] if r.over == "N" else shapes["sample" if r.tokens else "feature"] for r in region.reductions
    ]
    stores = sum(rows * width * size[s.dtype] for s in region.stores)
    stores += sum(region.length(r, rows) * size[wide] for r in region.reductions)
    tiles = len(region.products) * rows * n * max(size[region.dtype], size["bf16"])  # 8-bit products leave in 16
    plain = region.is_plain and not bytes_before  # it stores what the product stored
    return {
        "id": site.name,
        "products": [
            f"{p.name}: {left(region, f'in{a}')} @ {right(region, i, f'in{b}')}"
            for i, p in enumerate(region.products)
            for a, b in p.pairs
        ],
        "m": site.m,
        "n": n,
        "k": max(region.ks.values()),
        "stores": [f"{s.dtype}[{site.m}, {width}]" for s in region.stores],
        "reductions": [wide + shape for shape in sums],
        "loads": [f"{o.dtype}{shapes[o.extent]}" for o in region.operands],
        "bare": plain,
        "bytes_before": bytes_before,
        "bytes_after": 0 if plain else max(loads + stores - tiles, 0),
        "decision": "fused",
        "numerics": str(getattr(settings, "numerics", "default")),
        "outputs": list(site.outputs),
        **site_facts(site),
    }


def rows_of(site: Site, nodes: Mapping[str, fx.Node]) -> int:
    """M at the traced sizes."""
    if site.m.isdigit():
        return int(site.m)
    made = [elements(nodes[name]) for name in site.outputs if name in nodes]
    return max(made, default=0) // (site.region.width if site.region.stores else 1)


def declined(report: Report) -> bool:
    """Was the whole graph left to Inductor? Then the one refusal is of no node."""
    return any(not r.node for r in report.refused)


CAST = torch.ops.prims.convert_element_type.default
BY_ITS_LARGEST = "it casts to FP8 in one layout, by scales that are known only once what it casts is there"


def refusal(kernel: Kernel, report: Report) -> Facts:
    """Why a chain of operations stays with Inductor: the first condition that failed (planning begins at its end), and
    the user's line of the operation that it failed for."""
    names = {n.name for n in kernel.nodes}
    last = {"node": kernel.nodes[-1].name, "source": kernel_facts(kernel)["source"]}
    if declined(report):
        return {**last, "reason": report.refused[0].reason}
    for r in report.refused:
        if r.node in names:
            return {"node": r.node, "reason": r.reason, "source": r.source}
    if any(n.target is CAST and n.args[1] in EIGHT_BITS for n in kernel.nodes):
        return {**last, "reason": BY_ITS_LARGEST}
    feeds = {operation(n) for b in kernel.reads if b.op == "call_function" and not is_row(n := owner(b))}
    if any("attention" in name for name in feeds):
        why = "it reads the result of attention, which is no product of ours"
    elif not feeds & {*PRODUCTS, "bmm", "baddbmm", "region"}:
        why = "no product's result is read here"
    elif opaque := [r for r in report.opaque if r.node in names]:
        return {"node": opaque[0].node, "reason": opaque[0].reason, "source": opaque[0].source}
    elif all(operation(n) in ("clone", "cat", "stack", "_to_copy") for n in kernel.nodes if kind_of(n) != "view"):
        why = "it only copies, into the layout that its reader asks for"
    elif feeds & {"bmm", "baddbmm"} and not feeds & {*PRODUCTS, "region"}:
        why = BATCHED
    else:
        why = "nothing of it could be made in an epilogue"
    return {**last, "reason": why}


def with_reason(facts: Facts) -> Facts:
    """The facts of a graph: if there is nothing to say of it, why."""
    if any(facts[what] for what in facts if what != "kind"):
        return facts
    return facts | {"refused": [{"node": "", "reason": NOTHING, "source": ""}]}


def lone(report: Report, nodes: Mapping[str, fx.Node], chains: Sequence[Facts]) -> list[Facts]:
    """Refusals of products themselves, where no chain says the same; or that of the whole graph."""
    said = set() if declined(report) else {c["reason"] for c in chains}
    return [
        {"node": r.node, "reason": r.reason, "source": r.source}
        for r in report.refused
        if r.reason not in said and (not r.node or (r.node in nodes and operation(nodes[r.node]) in PRODUCTS))
    ]


def pass_facts(kernel: Kernel, refused: Facts, modules: Modules) -> Facts:
    """A kernel over memory that stays, and why it stays."""
    facts = kernel_facts(kernel)
    named = {"what": facts.pop("operations"), "why": refused["reason"], "source": refused["source"] or facts["source"]}
    return facts | named | {"module": modules.around(kernel.nodes)}


def module_facts(products: Sequence[fx.Node], modules: Modules) -> Facts:
    """Whose products a Region's are: the modules' paths, one word for all of them, and whether they are gradients."""
    paths = [*dict.fromkeys(filter(None, map(modules.path, products)))]
    return {"modules": paths, "module": together(paths), "backward": any(map(is_backward, products))}
