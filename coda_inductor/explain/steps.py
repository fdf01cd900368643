"""A model's graphs as programs: products with their epilogues, opaque operations and memory-bound passes, in order.

`program` returns the facts (the JSON form of the `graph` command); listing.py is their text. Before the rewriting the
steps are the kernels that Inductor would launch, after it the Regions and what is left. Values are named by the step
that makes them (y3 leaves step 3, s3 is its sum, acc3 its accumulator, o4 an opaque result, p5 a pass's), inputs by
the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import parse
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import left, right
from coda_inductor.explain.capture import capture
from coda_inductor.explain.modules import Modules, together
from coda_inductor.explain.offline import rewritten, target_of
from coda_inductor.explain.report import NOTHING
from coda_inductor.explain.rewriting import Derived, Rewriting
from coda_inductor.explain.units import Facts, kernel_facts, site_facts
from coda_inductor.inductor.records import Report
from coda_inductor.ops.custom import ADDED_REGION, ADDED_UP, REGION
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.plain import PLAIN
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import MATRIX_PRODUCTS
from coda_inductor.patterns.layout import TRANSPOSES
from coda_inductor.patterns.terms import Term, show
from coda_inductor.plan.built import Built, Source, Weight
from coda_inductor.plan.draft import Root
from coda_inductor.rewrite.space import Computed, Half, Lane
from coda_inductor.schedule.kinds import Extern, base_of, kind_of, lower, owner
from coda_inductor.schedule.model import Kernel, kernels

PRODUCTS = MATRIX_PRODUCTS | {g.aten.mm.dtype}
ADDING = {ADDED_UP, ADDED_REGION}
Kind = Literal["gemm", "opaque", "pass"]
DEPTH = 40  # of formulas, which end at stored values anyway


def program(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Settings,
) -> Facts:
    """Every graph of model(*args, **kwargs) before and after the rewriting for `target_of(settings)`. Needs no GPU."""
    graphs: list[Facts] = []
    capture(model, args, kwargs, mode, lambda graph: graphs.append(graph_facts(graph, settings)), settings)
    return {"schema": 1, "target": target_of(settings), "graphs": graphs}


def graph_facts(graph: fx.Graph, settings: Settings) -> Facts:
    """One graph, which is rewritten in place."""
    modules, before, rewriting = Modules.of(graph), Listing(graph).steps(), Rewriting()
    with contextlib.suppress(Unsupported):
        rewriting(graph, settings)
    return listed(graph, before, rewriting, modules)


def listed(graph: fx.Graph, before: list[Facts], rewriting: Rewriting, modules: Modules) -> Facts:
    """A graph that was rewritten, or refused, with its steps before. `untouched` says why nothing was rewritten."""
    kind = "joint" if g.is_joint(graph) else "inference"
    report, derived = rewriting.report, rewriting.derived
    if report is None:
        return {"kind": kind, "untouched": rewriting.refused, "before": before, "after": before, "laws": []}
    listing = Listing(rewritten(graph), derived, report, modules)
    after, laws = listing.steps(), listing.laws() if derived else []
    untouched = "" if report.rewrote else NOTHING
    return {"kind": kind, "untouched": untouched, "before": before, "after": after, "laws": laws}


@dataclass(eq=False, slots=True)
class Step:
    """A unit of the schedule: what it reads and makes, in the graph's own nodes."""

    kind: Kind
    node: fx.Node | None
    kernel: Kernel | None
    reads: list[fx.Node]
    made: list[fx.Node]
    place: int
    time: float = 0.0


@dataclass(slots=True)
class Listing:
    """The steps of a graph, named and in order; `derived`, `report` and `modules` of a rewritten one."""

    graph: fx.Graph
    derived: Derived | None = None
    report: Report | None = None
    modules: Modules | None = None
    names: dict[fx.Node, str] = field(default_factory=dict)
    by_term: dict[Term, str] = field(default_factory=dict)
    supplied: dict[str, fx.Node] = field(default_factory=dict)
    places: dict[fx.Node, int] = field(default_factory=dict)
    """Which of the built Regions a node is; in blocks of rows one stands once in each."""

    def steps(self) -> list[Facts]:
        """Every step as facts."""
        steps = ordered(units(self.graph))
        for node in self.graph.find_nodes(op="placeholder"):
            self.names[node] = node.meta.get("name", node.name)
        for i, step in enumerate(steps):
            letter = {"gemm": "y" if _is_region(step.node) else "acc", "opaque": "o", "pass": "p"}[step.kind]
            for j, node in enumerate(step.made):
                self.names[node] = f"{letter}{i}{_suffix(j, len(step.made))}"
        if self.derived:
            self.places = {s.node: self.index(s, steps) for s in steps if s.node is not None and _is_region(s.node)}
            self._name_terms(self.derived, steps)
        readers: dict[fx.Node, list[str]] = {}
        for i, step in enumerate(steps):
            for node in step.reads:
                readers.setdefault(node, []).append(f"[{i}]")
        for node in self.graph.output_node().all_input_nodes:
            readers.setdefault(base_of(node), []).append("output")
        return [self._facts(i, step, readers) for i, step in enumerate(steps)]

    def index(self, step: Step, steps: list[Step]) -> int:
        """Which of the built Regions a step is: by its text, and among equal ones by its place, in its block."""
        assert self.derived and step.node
        same = [i for i, b in enumerate(self.derived.builts) if b.region.text == step.node.args[1]]
        twins = sorted(
            (s for s in steps if _is_region(s.node) and s.node and s.node.args[1] == step.node.args[1]),
            key=lambda s: s.place,
        )
        return same[twins.index(step) % len(same)]

    def _name_terms(self, derived: Derived, steps: list[Step]) -> None:
        """Names for accumulators, stores, sums, and the graph's own tensors."""
        names = {n.name: n for n in self.graph.nodes}
        regions = [(self.places[s.node], i, s) for i, s in enumerate(steps) if s.node in self.places]
        for _, i, step in sorted(regions, key=lambda region: region[:2]):
            self._name_region(derived, i, step)
        products = derived.plan.program.lifted.products
        made = {acc.bit: self.by_term[acc].rstrip("ab") for b in derived.builts for acc in b.products}
        made |= {bit: self.names[p.node] for bit, p in products.items() if bit not in made and p.node in self.names}
        for t in derived.plan.program.lifted.terms:
            lanes = "".join(f"[{i}]" for _, i in t.lanes)
            if t.kind == "leaf":
                self.by_term[t] = (self.name(names[t.name]) if t.name in names else t.name) + lanes
            elif t.kind == "con" and t.bit in made:
                self.by_term.setdefault(t, made[t.bit] + lanes)

    def _name_region(self, derived: Derived, i: int, step: Step, again: bool = False) -> None:
        """The names of what a Region makes. `again`: of its own block from now on."""
        assert step.node
        built = derived.builts[self.places[step.node]]
        results = {int(user.args[1]): user for user in step.node.users}  # type: ignore[arg-type]
        for j, (t, *_) in enumerate(built.draft.stores):
            if j in results and (again or t not in self.by_term):
                self.by_term[t] = self.names[results[j]]
        for j, t in enumerate(built.draft.sums):
            if (result := results.get(j + len(built.draft.stores))) is not None:
                self.names[result] = f"s{i}{_suffix(j, len(built.draft.sums))}"
                self.by_term[t] = self.names[result]
        for j, acc in enumerate(built.products):
            self.by_term[acc] = f"acc{i}{_suffix(j, len(built.products))}"
        for x, source in derived.loads[self.places[step.node]].items():
            if isinstance(source, Computed | Half):
                self.by_term[x] = self._input(step, built, source)
        for node, stored in built.draft.supplies.items():
            self.supplied[node.name] = results[built.draft.stores.index(stored)]

    def name(self, node: fx.Node) -> str:
        """What the listing calls a tensor of the graph, before or after it was rewritten."""
        node = base_of(self.supplied.get(node.name, node))
        while node not in self.names and (g.is_view(node) or g.is_cast(node)):
            node = base_of(node.args[0])  # type: ignore[arg-type]
        return self.names.get(node, node.name)

    def _input(self, step: Step, built: Built, source: Source) -> str:
        """What a Region's input is called: the tensor, and the rows of a weight, or whose root it is."""
        assert step.node
        if isinstance(source, Lane):
            return self.name(source.node) + (f"[{source.index}]" if source.index is not None else "")
        if isinstance(source, Half):
            return f"{self._input(step, built, source.whole)}[{source.index}]"
        if isinstance(source, Root):
            return f"sqrt({self._input(step, built, source.square)})"
        node = step.node.args[0][built.inputs.index(source)]  # type: ignore[index]
        assert isinstance(node, fx.Node)
        rows = f"[{source.start}:{source.stop}]" if isinstance(source, Weight) and source.stop is not None else ""
        return self.name(node) + rows

    def _facts(self, i: int, step: Step, readers: Mapping[fx.Node, list[str]]) -> Facts:
        nodes = step.kernel.nodes if step.kernel else [step.node] if step.node else []
        facts: Facts = {"id": i, "kind": step.kind, "time": round(step.time, 1)}
        facts |= {"module": self._module(step, nodes), "backward": any(map(g.is_backward, nodes))}
        loads = list(dict.fromkeys(self.name(n) for n in step.reads))
        stores = [
            {"name": self.names[n], "type": _type(n), "to": readers.get(n, []), "formula": self._formula(n, step)}
            for n in step.made
        ]
        facts |= {"products": [], "loads": loads, "stores": stores, "sums": [], "laws": [], "source": ""}
        if step.kernel is not None:
            facts |= kernel_facts(step.kernel)
        elif step.node is not None and _is_region(step.node):
            if self._in_blocks(step):
                self._name_region(self.derived, i, step, again=True)  # type: ignore[arg-type]
            facts |= self._region(step, readers)
        elif step.node is not None and step.node.target is REGION:  # with nothing beside its product
            facts |= self._bare(i, step.node.args[1], *step.node.all_input_nodes)
            facts |= {"source": g.source_line(step.node)}
        elif step.node is not None and step.node.target in ADDING:
            facts |= self._adding(i, step.node)
        elif step.node is not None and step.node.target in PRODUCTS:
            of = g.operands(step.node)
            beside = [self.name(n) for n in (*of.addends, *of.scales)]
            facts |= self._product(i, of.left, of.right) | {"loads": beside, "source": g.source_line(step.node)}
        elif step.node is not None:
            facts |= {"what": str(step.node.target), "source": g.source_line(step.node)}
        return facts

    def _in_blocks(self, step: Step) -> bool:
        """Does its Region stand in several blocks of rows?"""
        return [*self.places.values()].count(self.places[step.node]) > 1  # type: ignore[index]

    def _adding(self, i: int, node: fx.Node) -> Facts:
        """A product that is added to others."""
        into, x, w, *text = node.args
        assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
        loads = [self.name(into)] if isinstance(into, fx.Node) else []
        facts: Facts = {"loads": loads, "source": g.source_line(node)}
        return facts | (self._bare(i, text[0], x, w) if text else self._product(i, x, w))

    def _bare(self, i: int, text: Any, x: fx.Node, w: fx.Node) -> Facts:
        """A Region with nothing beside its product."""
        region = parse(str(text))
        a, b = left(region, self.name(x)), right(region, 0, self.name(w))
        product = {"name": f"acc{i}", "a": a, "b": b, "k": str(region.products[0].k)}
        return {"products": [product], "digest": region.digest}

    def _product(self, i: int, x: fx.Node, w: fx.Node) -> Facts:
        """A product that is no Region."""
        a, b = (self.name(n) + (".T" if n.target in TRANSPOSES else "") for n in (x, w))
        return {"products": [{"name": f"acc{i}", "a": a, "b": b, "k": str(x.meta["val"].shape[-1])}]}

    def _module(self, step: Step, nodes: Sequence[fx.Node]) -> str:
        """The modules of a step, in one word; empty before the rewriting, and where none is known."""
        if self.modules is None:
            return ""
        if self.derived and _is_region(step.node):
            products = self.derived.products()[self.places[step.node]]  # type: ignore[index]
            return together(map(self.modules.path, products))
        return self.modules.around(nodes)

    def _formula(self, node: fx.Node, step: Step) -> str:
        """What a pass computes, in the names of the listing."""
        if self.derived is None or step.kind != "pass":
            return ""
        lifted = self.derived.plan.program.lifted
        term = next((t for n, t in lifted.term.items() if n.name == node.name), None)
        if term is None:
            return ""
        if term.kind == "leaf":
            return str(node.target)
        t = self.derived.plan.program.new[term]
        return show(t, DEPTH, {x: name for x, name in self.by_term.items() if x is not t})

    def _region(self, step: Step, readers: Mapping[fx.Node, list[str]]) -> Facts:
        """A Region: its accumulators, what its epilogue reads, stores and sums, and the laws that made it so."""
        assert self.derived and self.report and step.node
        at = self.places[step.node]
        built, site = self.derived.builts[at], self.report.sites[at]
        draft, region = built.draft, built.region
        names = {x: self._input(step, built, s) for x, s in self.derived.loads[at].items()}
        names |= {acc: self.by_term[acc] for acc in built.products}
        each = [(i, *term) for i, p in enumerate(region.products) for term in p.terms]
        products = [
            {
                "name": self.by_term[acc], "a": self._input(step, built, built.inputs[a]),
                "b": right(region, i, self._input(step, built, built.inputs[b])), "k": str(k),
            }
            for acc, (i, a, b, k) in zip(built.products, each, strict=True)
        ]  # fmt: skip
        results = {int(user.args[1]): user for user in step.node.users}  # type: ignore[arg-type]
        rows = site.m
        if self._in_blocks(step):
            rows = str(region.m([n.meta["val"] for n in step.node.args[0]]))  # type: ignore[union-attr]
        stores, sums = [], []
        for j, (t, dtype, _) in enumerate(draft.stores):
            name, to = (self.names[results[j]], readers.get(results[j], [])) if j in results else ("unread", [])
            shape = f"{dtype}[{rows}, {region.width}]"
            parts = [show(x, DEPTH, _without(names, x)) for x in self.derived.plan.program.parts(t, draft.space)]
            formula = f"({', '.join(parts)})" if parts[1:] else parts[0]
            stores.append({"name": name, "type": shape, "to": to, "formula": formula})
        for j, t in enumerate(draft.sums):
            result = results.get(j + len(draft.stores))
            name, to = (self.names[result], readers.get(result, [])) if result is not None else ("unread", [])
            r = region.reductions[j]
            over = f"each {r.tokens} of {r.over}" if r.tokens else r.over
            sums.append({"name": name, "to": to, "of": r.of, "over": over, "formula": show(t.args[0], DEPTH, names)})
        loads = list(dict.fromkeys(self._input(step, built, s) for s in built.inputs[region.matrices :]))
        facts: Facts = {"region": site.name, "shape": f"[{rows}, {region.n}]"}
        return facts | {"products": products, "loads": loads, "stores": stores, "sums": sums} | site_facts(site)

    def laws(self) -> list[Facts]:
        """Every firing of a law on a Region that is there, before and after, in the names of the listing."""
        assert self.derived
        there = {(con.bit, con.lanes) for b in self.derived.builts for con in b.products}
        out: list[Facts] = []
        for f in dict.fromkeys(self.derived.plan.firings):
            if f.product >= 0 and (f.product, f.before.lanes) not in there:
                continue
            names = {t: n for t, n in self.by_term.items() if t.kind != "con" or t.bit != f.product}
            mine = (t for t in self.by_term if t.kind == "con" and (t.bit, t.lanes) == (f.product, f.before.lanes))
            at = next((self.by_term[t] for t in mine), "")
            texts = [show(t, DEPTH, _without(names, t)) for t in (f.before, f.after)]
            out.append({"law": f.law, "at": at, "before": texts[0], "after": texts[1]})
        return out


def _without(names: Mapping[Term, str], t: Term) -> dict[Term, str]:
    """The names for a formula of t itself: a value that is loaded and stored again keeps its name."""
    return {x: n for x, n in names.items() if x is not t or x.kind in ("leaf", "con")}


def units(graph: fx.Graph) -> list[Step]:
    """The kernels, products, Regions and opaque operations of a graph."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    steps = []
    for kernel in kernels(graph):
        first = min(place.get(n, 0) for n in kernel.nodes)
        steps.append(Step("pass", None, kernel, list(kernel.reads), list(kernel.writes), first))
    for op in lower(graph).order:
        if not isinstance(op, Extern) or op.out.target is ELEMENTWISE:
            continue
        if any(isinstance(n.meta.get("val"), Tensor) for n in (op.out, *op.out.users)):
            made = [u for u in op.out.users if kind_of(u) == "output"] if not g.tensor(op.out) is not None else [op.out]
            kind: Kind = "gemm" if op.out.target in (*PRODUCTS, *ADDING, REGION) else "opaque"
            steps.append(Step(kind, op.out, None, list(op.reads), made, place[op.out]))
    return steps


def ordered(steps: list[Step]) -> list[Step]:
    """In an order that runs, with times: a product ends at a whole number, an opaque operation just before one, a pass
    stands between."""
    maker = {owner(n): s for s in steps for n in s.made}
    out: list[Step] = []
    ready: dict[Step, float] = {}

    def visit(step: Step) -> None:
        ready[step] = 0.0
        before = [maker[owner(n)] for n in step.reads if owner(n) in maker]
        for s in before:
            if s not in ready:
                visit(s)
        latest = max((ready[s] for s in before), default=0.0)
        whole = float(int(latest) + 1)
        step.time = {"gemm": whole, "opaque": whole - 0.1, "pass": latest + 0.2}[step.kind]
        ready[step] = step.time if step.kind == "pass" else whole
        out.append(step)

    for step in sorted(steps, key=lambda s: s.place):
        if step not in ready:
            visit(step)
    return out


def _is_region(node: fx.Node | None) -> bool:
    """Is it a Region that was derived?"""
    return node is not None and node.target is REGION and PLAIN not in node.meta


def _suffix(j: int, count: int) -> str:
    """Nothing for the only one, else a, b, c, ..."""
    return "" if count == 1 else chr(ord("a") + j) if count <= 26 else f".{j}"


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
