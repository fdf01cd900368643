"""The joint pass: read, derive, write. All of it or nothing: an error leaves the graph as it was.

Dynamo's graph arrives here after AOTAutograd and Inductor's decompositions, before partitioning and before Inductor's
own patterns; the no_grad graph passes the same place.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.settle import settled
from coda_inductor.passes import sweeps
from coda_inductor.passes.casts import Cast, round_first, write_wide
from coda_inductor.passes.plain import PLAIN, plain_products, write_plain
from coda_inductor.passes.switches import CASTS, NAMES, REGION_KINDS, SWEEPS, TABLES, allowed
from coda_inductor.passes.tables import Table, store_tables
from coda_inductor.patterns import graph as g
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Computed
from coda_inductor.plan.draft import Refusal as Refused
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.rotate_half import OF_HEADS
from coda_inductor.rewrite.sources import statistics
from coda_inductor.tuning.verdicts import ACCEPT_ALL, Decisions
from coda_inductor.write.emit import emit
from coda_inductor.write.kept import keep, store
from coda_inductor.write.verifying import Before, verify, verify_kept


@dataclass(frozen=True, slots=True)
class Site:
    """One Region in the graph. `absorbed` are the original nodes whose work now happens in it, `outputs` what it
    supplies."""

    name: str
    region: Region
    m: str
    laws: tuple[str, ...]
    absorbed: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that follows a product but stays with Inductor: the first condition that failed, and the user's line."""

    node: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rewrite did."""

    sites: tuple[Site, ...] = ()
    refused: tuple[Refusal, ...] = ()
    opaque: tuple[Refusal, ...] = ()
    """Operations that were not understood at all."""
    tables: tuple[Table, ...] = ()
    """What is computed once for many elements."""
    casts: tuple[Cast, ...] = ()
    """What was cast elsewhere than it is now."""
    swept: tuple[sweeps.Kept, ...] = ()
    """What stands beside attention in one kernel of ours."""
    seconds: float = 0.0
    backward: tuple[int, int] = (0, 0)
    """Of a contest: how many of the backward's Regions, as they were first derived, are kept, and how many there were.
    (One counts as kept if all its products are in Regions, whichever.)"""
    timings: tuple[dict[str, Any], ...] = ()
    """What the contest measured, in its order: the digests of a group's Regions, "ms" and Inductor's "baseline_ms",
    and, unless these decided, the same two with "busy_" before them: what they add to a busy GPU, or, of long calls,
    the same again (timing.Times). Where it says "against", the other side is not Inductor but the program without a
    law, with these Regions."""


def is_joint(graph: fx.Graph) -> bool:
    """Does the graph hold a forward and its backward?"""
    return any(map(g.is_tangent, graph.nodes))


def rewrite(
    graph: fx.Graph,
    settings: Settings,
    target: str = "reference",
    decisions: Decisions = ACCEPT_ALL,
) -> Report:
    """Rewrites the graph in place, as far as the judges let it pass. Raises BrokenInvariant for a bug; the owning
    module then has its graph back as it was."""
    start = time.perf_counter()
    backup = g.copied(graph)
    guards = _guards(graph)
    try:
        report = _rewrite(graph, settings, target, decisions)
        if _guards(graph) != guards:
            raise BrokenInvariant("the rewrite added a guard")
    except BaseException:
        assert graph.owning_module is not None
        graph.owning_module.graph = backup
        raise
    return dataclasses.replace(report, seconds=time.perf_counter() - start)


def _rewrite(graph: fx.Graph, settings: Settings, target: str, decisions: Decisions) -> Report:
    device = next((n.meta["val"].device for n in graph.nodes if n.target in g.MATRIX_PRODUCTS), None)
    before = Before.of(graph)
    casts = round_first(graph) if allowed(CASTS, NAMES, settings) else ()
    verify(graph, before, "casts that are rounded first")
    found = settled(graph, settings, decisions)
    made, builts = found.plan, found.plan.builts
    lifted = made.program.lifted
    names = {n.name: n for n in graph.nodes}
    lines = {n.name: g.source_line(n) for n in graph.nodes}
    terms = {n.name: lifted.deps[n] for n in graph.nodes if n.op == "call_function" and not g.is_view(n)}
    nodes = {bit: product.node for bit, product in lifted.products.items()}
    made.firings += [normaliser.firing(made.program) for normaliser in found.normalisers]
    fired = _fired(made)
    refused = tuple(Refusal(r.node.name, _reason(made, r, found.whole_heads), lines[r.node.name]) for r in made.refused)
    reasons = {n.name: why for n, why in lifted.reading.opaque.items() if n.op == "call_function"}
    opaque = tuple(Refusal(name, why, lines[name]) for name, why in reasons.items())
    sites = [_site(i, b, nodes, fired, lines) for i, b in enumerate(builts)]
    emit(made, builts, target, before)
    verify(graph, before, "Regions")
    left = {n.name for n in graph.nodes}
    gone = [n for n in names if n in terms and n not in left]
    tables = store_tables(graph) if allowed(TABLES, NAMES, settings) else ()
    verify(graph, before, "tables")
    sites, slow = _absorb(sites, builts, gone, terms), tuple[Refusal, ...]()
    if device is not None:
        casts += write_wide(graph, device) if may_widen(settings, target) else ()
        plain, slow = _plain(graph, settings, target, decisions, device, len(sites))
        sites += plain
    verify(graph, before, "plain products")
    swept = tuple[sweeps.Kept, ...]()
    if allowed(SWEEPS, NAMES, settings):
        swept, apart = _sweeps(graph, settings, target, decisions, before)
        slow += apart
        assert graph.owning_module is not None
        graph = graph.owning_module.graph  # the one without Sweeps if they could not be written
    verify(graph, before, "sweeps")
    keep(graph)
    store(graph)
    verify(graph, before, "copies for the backward")
    verify_kept(graph)
    return Report(tuple(sites), refused + slow, opaque, tables, casts, swept)


def may_widen(settings: Settings, target: str) -> bool:
    """May products leave in float32? None does on the CPU, and of cuBLAS's rivals under max_autotune none can."""
    tuned = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return target != "reference" and settings.numerics != "strict" and allowed(CASTS, NAMES, settings) and not tuned


def _plain(
    graph: fx.Graph,
    settings: Settings,
    target: str,
    decisions: Decisions,
    device: torch.device,
    count: int,
) -> tuple[list[Site], tuple[Refusal, ...]]:
    """What is left of the products as bare Regions, where none is slower: their sites, after `count` others, and the
    rest."""
    found, losers = (
        plain_products(graph, decisions.legal, device) if allowed(PLAIN, REGION_KINDS, settings) else ({}, {})
    )
    losers |= decisions.slower_plain(found)
    refused = tuple(Refusal(n.name, why, g.source_line(n)) for n, why in losers.items())
    kept = {n: made for n, made in found.items() if n not in losers}
    places = [(str(n.meta["val"].shape[0]), n.name, g.source_line(n)) for n in kept]
    outputs = write_plain(graph, target, kept)
    sites = [
        Site(f"r{i}", region, m, (), (name,), (out.name,), line)
        for i, ((region, _), (m, name, line), out) in enumerate(zip(kept.values(), places, outputs, strict=True), count)
    ]
    return sites, refused


def _sweeps(
    graph: fx.Graph, settings: Settings, target: str, decisions: Decisions, before: Before
) -> tuple[tuple[sweeps.Kept, ...], tuple[Refusal, ...]]:
    """What stands beside attention as Sweeps, where none is slower, and the rest."""
    found, refused = sweeps.found(graph, settings.numerics == "strict", decisions.legal)
    losers = decisions.slower_sweeps(found)
    for i, why in losers.items():
        refused |= dict.fromkeys(found[i].outputs, why)
    apart = tuple(Refusal(n.name, why, g.source_line(n)) for n, why in refused.items())
    kept, backup = [made for i, made in enumerate(found) if i not in losers], g.copied(graph) if found else graph
    try:
        return sweeps.write(graph, target, kept, before), apart
    except Unsupported as why:  # collectives in another order, a size that no node holds: the Regions stay
        assert graph.owning_module is not None
        graph.owning_module.graph = backup
        lost = ((n.name, g.source_line(n)) for made in kept for n in made.outputs)
        return (), apart + tuple(Refusal(name, why.what, line) for name, line in lost)


def _reason(made: Plan, refused: Refused, whole_heads: dict[int, str]) -> str:
    """Why a node is refused. What heads are refused for whose product (by bit) is `unhalved` follows from why it is."""
    if refused.reason not in OF_HEADS:
        return refused.reason
    hosts = made.program.new[made.program.lifted.term[refused.node]].hosts
    return whole_heads.get(hosts.bit_length() - 1, refused.reason)


def _fired(made: Plan) -> dict[object, set[str]]:
    """The laws that made each product (by bit) and each sum what it is."""
    fired: dict[object, set[str]] = {}
    for f in made.firings:
        for what in [f.product] if f.product >= 0 else statistics(f.after):
            fired.setdefault(what, set()).add(f.law)
    return fired


def _site(
    i: int, built: Built, nodes: dict[int, fx.Node], fired: dict[object, set[str]], lines: dict[str, str]
) -> Site:
    bits = [acc.bit for acc in built.draft.space.accs]
    value = g.tensor(nodes[bits[-1]])
    assert value is not None
    beside = [s for x in built.inputs if isinstance(x, Computed) for s in statistics(x.term)]
    laws = tuple(sorted({law for what in (*bits, *built.draft.sums, *beside) for law in fired.get(what, ())}))
    outputs = tuple(n.name for n in built.draft.supplies)
    return Site(f"r{i}", built.region, str(value.shape[0]), laws, (), outputs, lines[nodes[bits[-1]].name])


def _absorb(sites: list[Site], builts: list[Built], gone: list[str], deps: dict[str, int]) -> list[Site]:
    """Shares the vanished nodes out: each went into the last Region on which it depends."""
    masks = [built.mask for built in builts]
    mine: list[list[str]] = [[] for _ in sites]
    for name in gone:
        owners = [i for i, mask in enumerate(masks) if deps[name] & mask]
        if owners:
            mine[max(owners, key=lambda i: masks[i])].append(name)
    return [
        Site(s.name, s.region, s.m, s.laws, tuple(m), s.outputs, s.source) for s, m in zip(sites, mine, strict=True)
    ]


def _guards(graph: fx.Graph) -> int:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return len(value.node.shape_env.guards)
    return 0
