"""Terms on torch tensors, and graphs with the values of all nodes: what the tests of reading and deriving rest on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import pytest
import torch
from odd_programs import ODD
from random_programs import random_program
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx_inner
from zoo import CASES

import coda_inductor.inductor.compile
from coda_inductor.core.ops import OPS
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.passes.parts import split_products
from coda_inductor.patterns.lift import Lifted, lift
from coda_inductor.patterns.terms import Term


class Evaluator:
    """The value of a term as a tensor over its axes in ascending order, given the value of each leaf's node."""

    def __init__(self, lifted: Lifted, values: dict[str, Tensor]) -> None:
        self.lifted, self.values = lifted, values
        self.nodes = {n.name: n for n in lifted.graph.nodes}
        self.known: dict[Term, Tensor] = {}
        self.extents = self._extents()

    def _extents(self) -> dict[int, int]:
        """The elements along each atomic axis; a symbolic one's by a dimension that holds no other unknown."""
        axes, known = self.lifted.reading.axes, dict[int, int]()
        dims = [
            (ids, extent)
            for node in self.lifted.reading.dims
            for ids, extent in zip(self.lifted.reading.roots(node), self.values[node.name].shape, strict=True)
        ]
        for ids, extent in sorted(dims, key=lambda d: len(d[0])):
            known |= {i: s for i in ids if (s := axes.size[i].static) is not None}
            unknown = [i for i in ids if i not in known]
            if len(unknown) == 1:
                known[unknown[0]] = extent // math.prod(known[i] for i in ids if i in known)
        return known

    def __call__(self, t: Term) -> Tensor:
        todo = [t]
        while todo:
            x = todo[-1]
            missing = [a for a in x.args if a not in self.known]
            if x in self.known or not missing:
                todo.pop()
                if x not in self.known:
                    self.known[x] = self._value(x)
            todo += missing
        return self.known[t]

    def at(self, t: Term, axes: Sequence[int]) -> Tensor:
        """The value of t over a list of axes that holds all of its own; size 1 where it does not vary."""
        own = sorted(t.axes)
        value = self(t).permute([own.index(i) for i in axes if i in t.axes])
        return value[tuple(slice(None) if i in t.axes else None for i in axes)]

    def of(self, node: fx.Node, t: Term) -> Tensor:
        """t in the shape of the node."""
        order = [i for d in self.lifted.reading.roots(node) for i in d]
        assert len(set(order)) == len(order) and t.axes <= set(order), f"{node}: {sorted(t.axes)} is not in {order}"
        return self.at(t, order).expand([self.extents[i] for i in order]).reshape(self.values[node.name].shape)

    def _value(self, t: Term) -> Tensor:
        axes = sorted(t.axes)
        args = [self.at(a, axes) for a in t.args] if t.kind in ("mul", "add", "fn") else []
        if t.kind == "mul":
            powers = [_power(a, float(p)) for a, p in zip(args, t.powers, strict=True)]
            return reduce(torch.mul, powers, torch.tensor(float(t.coefficient), dtype=torch.float64))
        if t.kind == "add":
            weighted = [float(w) * a for a, w in zip(args, t.powers, strict=True)]
            return reduce(torch.add, weighted, torch.tensor(float(t.coefficient), dtype=torch.float64))
        if t.kind == "fn":
            return OPS[t.name].torch(*args)
        if t.kind == "con":
            return self._contract(t, axes)
        if t.kind == "red":
            own = sorted(t.args[0].axes)
            dims = [own.index(i) for i in t.over]
            return REDUCTIONS[t.name].torch(self(t.args[0]), dims)  # type: ignore[arg-type]
        if t.kind == "lanes":
            inner = [i for i in axes if i != t.over[0]]
            shape = torch.broadcast_shapes(*(self.at(a, inner).shape for a in t.args))
            return torch.stack([self.at(a, inner).expand(shape) for a in t.args], axes.index(t.over[0]))
        return self._leaf(t)

    def _contract(self, t: Term, axes: list[int]) -> Tensor:
        a, b = t.args
        letter = {axis: i for i, axis in enumerate(sorted(a.axes | b.axes))}
        value: Tensor = torch.einsum(
            self(a),
            [letter[i] for i in sorted(a.axes)],
            self(b),
            [letter[i] for i in sorted(b.axes)],
            [letter[i] for i in axes],
        )
        for i in t.over:  # over which neither varies
            value = value if i in letter else value * self.extents[i]
        return value

    def _leaf(self, t: Term) -> Tensor:
        node = self.nodes[t.name]
        fixed = dict(t.lanes)
        order = [i for d in self.lifted.reading.roots(node) for i in d]
        value = self.values[t.name].to(torch.float64).reshape([self.extents[i] for i in order])
        value = value[tuple(fixed.get(i, slice(None)) for i in order)]
        left = [i for i in order if i not in fixed]
        return value.permute([left.index(i) for i in sorted(left)])


def _power(x: Tensor, p: float) -> Tensor:
    return x.sqrt() if p == 0.5 else x.rsqrt() if p == -0.5 else x**p


@dataclass
class Graph:
    """A graph as the pass found it, and the inputs that it ran on."""

    graph: fx.Graph
    inputs: list[Any] = field(default_factory=list)

    def values(self) -> dict[str, Tensor]:
        """What every node computes."""
        found: dict[str, Tensor] = {}

        class Recorder(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if isinstance(value, Tensor):
                    found[n.name] = value.clone()
                return value

        args = [a.clone() if isinstance(a, Tensor) else a for a in self.inputs]
        Recorder(self.graph.owning_module).run(*args)  # type: ignore[arg-type]
        return found


class Read:
    """One graph lifted, with the values of all its nodes."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values()
        self.lifted = lift(graph.graph)
        self.value = Evaluator(self.lifted, self.values)


@cache
def read(kind: str, name: str | int) -> list[Read]:
    """The graphs of a case of the zoo, an odd graph, or a random program."""
    if kind == "zoo":
        model, args = next(case for case in CASES if case.name == name).build()
        graphs = captured(model, *args)
        for g in graphs:
            split_products(g.graph)  # which the derivation reads
        return [Read(g) for g in graphs]
    torch.manual_seed(0)
    function, inputs = ODD[str(name)] if kind == "odd" else random_program(int(name))
    return [Read(g) for g in captured(function, *(inputs() if callable(inputs) else inputs))]


NAMES = [("zoo", c.name) for c in CASES] + [("odd", name) for name in ODD] + [("random", i) for i in range(40)]


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative to the largest value; infinite where shape, dtype or NaNs differ."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if not found.equal(wanted) else 0.0


def flat(x: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


@contextmanager
def strict_reference(*, run: bool = True) -> Iterator[None]:
    """Regions on torch, failures raised, no cache of Inductor's in the way. With `run` Inductor compiles, also under
    `interpreted`; without, the graph is interpreted, as most of a test's time would go to that."""
    import torch._functorch.config
    import torch._inductor.config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_INDUCTOR_TARGET", "reference")
        patch.setenv("CODA_INDUCTOR_STRICT", "1")
        patch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", compile_fx_inner)
        torch._dynamo.reset()
        with (
            nullcontext() if run else interpreting(),
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            yield
        torch._dynamo.reset()


@contextmanager
def interpreting() -> Iterator[None]:
    """Within, graphs that Inductor would compile are interpreted instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", _interpreted)
        yield


def _interpreted(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # Inductor lowers both alike
    gm.recompile()

    def run(*args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], list):
            args, boxed = tuple(args[0]), args[0]
            boxed.clear()
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiled(model: Callable[..., Any], *args: Any, run: bool = True, **options: Any) -> tuple[Any, list[Report]]:
    """model(*args) under no_grad through backend="coda", and the reports of its graphs."""
    with strict_reference(run=run), torch.no_grad():
        before = list(REPORTS)
        REPORTS.clear()
        found = torch.compile(model, backend="coda", options=options)(*args)
        reports = list(REPORTS)
        REPORTS.clear()
        REPORTS.extend(before + reports)
    return found, reports


def captured(model: Callable[..., Any], *args: Any) -> list[Graph]:
    """The graphs of model(*args) as the joint pass finds them, with the inputs that they get."""
    graphs: list[Graph] = []

    def note(graph: fx.Graph, *_: Any, **__: Any) -> Report:
        graphs.append(Graph(fx.GraphModule(graph.owning_module, copy.deepcopy(graph)).graph))  # type: ignore[arg-type]
        return Report()

    def record(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        mine, run = graphs[-1] if graphs else Graph(gm.graph), _interpreted(gm, inputs)

        def call(*args: Any) -> Any:
            flat = args[0] if len(args) == 1 and isinstance(args[0], list) else args
            mine.inputs = [a.clone() if isinstance(a, Tensor) else a for a in flat]
            return run(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    with strict_reference(), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(joint_pass, "rewrite", note)
        patch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", record)
        torch.compile(model, backend="coda")(*args)
    return [g for g in graphs if g.inputs]
