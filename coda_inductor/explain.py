"""What coda-inductor does to a model, and what it leaves to Inductor: counted on the graphs alone, no GPU, nothing run.

`explain` returns the facts (the JSON form of the `explain` command, schema 1); `render` is their text.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES, Region
from coda_inductor.inductor.capture import capture
from coda_inductor.inductor.lowering import base_of, elements, hint, kind_of, owner
from coda_inductor.inductor.schedule import Kernel, itemsize, kernels, partition, saved

Facts = dict[str, Any]


class Site(Protocol):
    """One region of a rewritten graph: joint.Site."""

    @property
    def name(self) -> str: ...
    @property
    def region(self) -> Region: ...
    @property
    def m(self) -> str: ...
    @property
    def laws(self) -> tuple[str, ...]: ...
    @property
    def absorbed(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def source(self) -> str: ...


class Refusal(Protocol):
    """One thing that was not rewritten: joint.Refusal."""

    @property
    def node(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def source(self) -> str: ...


class Report(Protocol):
    """What a rewriting did: joint.Report."""

    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def refused(self) -> Sequence[Refusal]: ...


Rewrite = Callable[[fx.Graph, Any], Report]


@dataclass(frozen=True, slots=True)
class Touch:
    """The bytes that one kernel moves of one tensor, and the names of its operations that touch this tensor."""

    bytes: int
    operations: frozenset[str]


def explain(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Any,
    rewrite: Rewrite | None = None,
) -> Facts:
    """The facts about every graph of model(*args, **kwargs), and their totals. `rewrite` is for tests."""
    how = rewrite or _default
    graphs: list[Facts] = []
    counted: list[Facts] = []

    def on_graph(graph: fx.Graph) -> None:
        facts, totals = explain_graph(graph, settings, how)
        graphs.append(facts)
        counted.append(totals)

    capture(model, args, kwargs, mode, on_graph)
    sums: Counter[str] = Counter()
    for totals in counted:
        sums.update(totals)
    covered = sums.pop("covered", 0)
    coverage = covered / sums["bytes_before"] if sums["bytes_before"] else 0.0
    names = ("bytes_before", "bytes_after", "passes_left", "saved_bytes", "saved_bytes_inductor", "regions")
    totals = {name: sums[name] for name in (*names, "kernels_before", "kernels_after")}
    return {"schema": 1, "graphs": graphs, "totals": {**totals, "coverage": coverage}}


def _default(graph: fx.Graph, settings: Any) -> Report:
    """The joint pass itself, imported late so that counting needs nothing of it."""
    from coda_inductor.inductor import joint

    return joint.rewrite(graph, settings)


@dataclass(frozen=True, slots=True)
class Nothing:
    """The report of a rewriting that declined the whole graph."""

    refused: tuple[Whole, ...]
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A refusal of everything."""

    reason: str
    source: str
    node: str = ""


def explain_graph(graph: fx.Graph, settings: Any, rewrite: Rewrite) -> tuple[Facts, Facts]:
    """One graph, which is rewritten in place: its facts, and what it adds to the totals ("covered" in bytes)."""
    halves = partition(graph)
    before = kernels(graph, halves)
    touches = [touch for kernel in before for touch in touched(kernel)]
    saved_before = sum(saved(halves).values()) if halves else 0
    smallest = smallest_tile(graph)
    try:
        report = rewrite(graph, settings)
    except Unsupported as why:
        report = Nothing((Whole(str(why), why.where),))
    halves = partition(graph)
    after = kernels(graph, halves)
    share = attribute(touches, report.sites)
    nodes = {n.name: n for n in graph.nodes}
    regions = [region_facts(site, nodes, share.get(site.name, 0), settings) for site in report.sites]
    reasons = {r.node: r.reason for r in report.refused}
    left = sorted((k for k in after if touches_tile(k, smallest)), key=lambda k: -k.bytes)
    facts: Facts = {
        "kind": "joint" if halves else "inference",
        "regions": regions,
        "passes": [pass_facts(k, reasons) for k in left],
        "refused": [{"node": r.node, "reason": r.reason, "source": r.source} for r in report.refused],
    }
    totals: Facts = {
        "bytes_before": sum(k.bytes for k in before),
        "bytes_after": sum(k.bytes for k in after) + sum(r["bytes_after"] for r in regions),
        "covered": sum(share.values()),
        "passes_left": len(left),
        "saved_bytes": sum(saved(halves).values()) if halves else 0,
        "saved_bytes_inductor": saved_before,
        "regions": len(regions),
        "kernels_before": len(before),
        "kernels_after": len(after),
    }
    return facts, totals


def touched(kernel: Kernel) -> list[Touch]:
    """A kernel's bytes, tensor by tensor, with the operations of the kernel that read or write each."""
    users: dict[fx.Node, set[str]] = {buffer: set() for buffer in kernel.reads}
    for node in kernel.nodes:
        for value in node.all_input_nodes:
            if (base := base_of(value)) in users:
                users[base].add(node.name)
    made = [Touch(moved, frozenset({owner(buffer).name})) for buffer, moved in kernel.writes.items()]
    return [Touch(kernel.reads[b], frozenset(names)) for b, names in users.items()] + made


def attribute(touches: Iterable[Touch], sites: Sequence[Site]) -> dict[str, int]:
    """Bytes that no operation outside a Region moves any more, by the site that absorbed most of what moved them."""
    homes: dict[str, list[str]] = {}
    for site in sites:
        for name in site.absorbed:
            homes.setdefault(name, []).append(site.name)
    share: Counter[str] = Counter()
    for touch in touches:
        if touch.operations and all(name in homes for name in touch.operations):
            most = Counter(home for name in sorted(touch.operations) for home in homes[name])
            share[most.most_common(1)[0][0]] += touch.bytes
    return dict(share)


def region_facts(site: Site, nodes: Mapping[str, fx.Node], bytes_before: int, settings: Any) -> Facts:
    """What the user sees of one region. bytes_after: its loads and stores beyond one output tile per product."""
    region, n = site.region, site.region.n
    rows = rows_of(site, nodes)
    shapes = {"token": (rows, f"[{site.m}]"), "feature": (n, f"[{n}]"), "tile": (rows * n, f"[{site.m}, {n}]")}
    wide = "f64" if region.dtype == "f64" else "f32"
    size = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    loads = sum(shapes[o.extent][0] * size[o.dtype] for o in region.operands)
    stores = sum(rows * n * size[s.dtype] for s in region.stores) + len(region.reductions) * rows * size[wide]
    tiles = len(region.products) * rows * n * size[region.dtype]
    return {
        "id": site.name,
        "products": [f"{p.name}: in{p.a} @ in{p.b}{'.T' if p.b_layout == 'nk' else ''}" for p in region.products],
        "m": site.m,
        "n": n,
        "k": max(p.k for p in region.products),
        "laws": list(site.laws),
        "stores": [f"{s.dtype}[{site.m}, {n}]" for s in region.stores],
        "reductions": [f"{wide}[{site.m}]" for _ in region.reductions],
        "loads": [f"{o.dtype}{shapes[o.extent][1]}" for o in region.operands],
        "bytes_before": bytes_before,
        "bytes_after": max(loads + stores - tiles, 0),
        "decision": "fused",
        "numerics": str(getattr(settings, "numerics", "default")),
        "source": site.source,
        "digest": region.digest,
        "outputs": list(site.outputs),
    }


def rows_of(site: Site, nodes: Mapping[str, fx.Node]) -> int:
    """M at the traced sizes."""
    if site.m.isdigit():
        return int(site.m)
    made = [elements(nodes[name]) for name in site.outputs if name in nodes]
    return max(made, default=0) // (site.region.n if site.region.stores else 1)


def smallest_tile(graph: fx.Graph) -> int:
    """Elements of the smallest output [M, N] of a product over the tokens, as many as most products have rows."""
    names = ("aten::mm", "aten::addmm")
    products = [n for n in graph.nodes if getattr(n.target, "_schema", None) and n.target._schema.name in names]
    rows = [elements(p) // max(_last(p), 1) for p in products]
    if not rows:
        return 1 << 20
    tokens = Counter(rows).most_common(1)[0][0]
    return min(elements(p) for p, m in zip(products, rows, strict=True) if m == tokens)


def _last(node: fx.Node) -> int:
    return hint(node.meta["val"].shape[-1])


def touches_tile(kernel: Kernel, smallest: int) -> bool:
    """Does the kernel read or write a whole M x N tensor?"""
    moved = [(n, b) for d in (kernel.reads, kernel.writes) for n, b in d.items()]
    return any(b // itemsize(n) >= smallest for n, b in moved)


def pass_facts(kernel: Kernel, reasons: Mapping[str, str]) -> Facts:
    """A kernel that stays with Inductor: its operations in order, and why it stays."""
    work = [n for n in kernel.nodes if kind_of(n) != "view"]
    names = dict.fromkeys(_operation(n) for n in work)
    known = dict.fromkeys(reasons[n.name] for n in kernel.nodes if n.name in reasons)
    return {
        "what": " ".join(names),
        "bytes": kernel.bytes,
        "why": "; ".join(known) or _why(kernel),
        "source": next((s for n in reversed(work) if (s := source(n))), ""),
        "nodes": [n.name for n in work],
    }


def _operation(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else str(node.target)


def _why(kernel: Kernel) -> str:
    """A reason from the kernel's inputs, where the rewriting gave none."""
    feeds = {_operation(owner(b)) for b in kernel.reads if b.op == "call_function"}
    if any("attention" in name for name in feeds):
        return "reads the result of attention, which is no product of ours"
    if not any(name in ("mm", "addmm", "bmm", "baddbmm", "region") for name in feeds):
        return "no product's result is read here"
    return "left to Inductor"


FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = os.path.dirname(torch.__file__) + os.sep


def source(node: fx.Node) -> str:
    """ "file:line" of the innermost frame outside torch, relative to the working directory if it lies below."""
    frames = [(file, line) for file, line in FRAME.findall(node.meta.get("stack_trace") or "") if TORCH not in file]
    if not frames:
        return ""
    file, line = frames[-1]
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line}"


def render(report: Facts) -> str:
    """The report for people: totals first, then every graph's regions, what is left, and what was refused."""
    t = report["totals"]
    kept = f"; saved for backward {_gb(t['saved_bytes_inductor'])} -> {_gb(t['saved_bytes'])}"
    lines = [
        f"{t['regions']} regions; memory-bound traffic {_gb(t['bytes_before'])} -> {_gb(t['bytes_after'])}"
        f" ({t['coverage']:.1%} of it absorbed); kernels {t['kernels_before']} -> {t['kernels_after']},"
        f" {t['passes_left']} of them over M x N tensors"
    ]
    lines[0] += kept if t["saved_bytes_inductor"] else ""
    for i, graph in enumerate(report["graphs"]):
        lines.append(f"\ngraph {i} ({graph['kind']})")
        for r in graph["regions"]:
            n_products = f"{len(r['products'])} products, " if len(r["products"]) > 1 else ""
            leaves = f"{len(r['stores'])} stores, {len(r['reductions'])} sums"
            what = f"[{r['m']}, {r['n']}] K={r['k']}: {n_products}{leaves}"
            laws = f"  {'+'.join(r['laws'])}" if r["laws"] else ""
            moved = f"{_gb(r['bytes_before'])} -> {_gb(r['bytes_after'])}"
            lines.append(f"  {r['id']:<12} {what:<52} {moved:<22} {r['source']}{laws}")
        for title, rows in (("left to Inductor", _grouped(graph["passes"])), ("refused", _refusals(graph["refused"]))):
            lines += [f"  {title}:", *rows] if rows else []
    return "\n".join(lines)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count / 1e6:.2f} MB"


def _grouped(passes: Sequence[Facts]) -> list[str]:
    """Equal passes of many layers on one line."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for p in passes:
        same.setdefault((p["what"], p["why"], p["source"]), []).append(p["bytes"])
    return [f"    {len(b)} x {_gb(b[0])}  {what[:80]}  ({why})  {at}" for (what, why, at), b in same.items()]


def _refusals(refused: Sequence[Facts]) -> list[str]:
    same = Counter((r["reason"], r["source"]) for r in refused)
    return [f"    {n} x {reason}  {at}" for (reason, at), n in same.items()]
