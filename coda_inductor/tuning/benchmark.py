"""The fused program and the baseline as functions without arguments: kernels, small computations, and what
Inductor makes of the same nodes of the user's graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core import blocks
from coda_inductor.core.errors import CodaError, Unsupported, forget_frames
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import launch
from coda_inductor.measure import tune
from coda_inductor.passes.complex import pack_pairs
from coda_inductor.passes.reductions import write_maxima, write_softmax_sums
from coda_inductor.passes.switches import COMPLEX, ELEMENTWISE, NAMES, allowed, longest_held
from coda_inductor.passes.tables import put_into_memory
from coda_inductor.patterns.effects import effects
from coda_inductor.patterns.sizes import hint
from coda_inductor.plan.built import Built, Weight
from coda_inductor.plan.plan import Plan
from coda_inductor.schedule.held import CacheMark, rows_held
from coda_inductor.tuning.extract import Program, described, small, subgraph
from coda_inductor.tuning.group import Group, outputs
from coda_inductor.tuning.outcome import foreseen

PLAINLY = {"joint_custom_pre_pass": None, "joint_custom_post_pass": None, "max_autotune": False,
           "coordinate_descent_tuning": False, "triton.cudagraphs": False}  # fmt: skip
"""The modes of torch.compile are off, also under max-autotune: records are shared by all modes. Before torch 2.12 the
options of the compile around us hold in this thread, too: under mode="reduce-overhead" the copies into a CUDA graph's
memory were timed (H200: 12 ms for a group of four layers of BERT-large, which take 1.7)."""

SAID = 200  # characters of an error of Inductor's

log = logging.getLogger("coda_inductor.tuning")


@dataclass(slots=True)
class Programs:
    """Small programs as Inductor compiles them, each once: layers are alike, and so are the derivations compared."""

    settings: Settings
    done: dict[str, Callable[..., Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """What Inductor said of those that it cannot compile."""

    def compiled(self, graph: fx.Graph, tensors: list[Tensor]) -> Callable[..., Any]:
        """The graph as a function of such tensors, compiled in a thread of its own: the compile around us has its own
        contexts. Raises Unsupported if Inductor cannot: it may compile the whole graph all the same."""
        text = described(*graph.nodes)
        if text not in self.done and text not in self.failed:
            as_in_the_whole(graph, self.settings)
            try:
                with ThreadPoolExecutor(1) as worker:
                    module = fx.GraphModule(torch.nn.Module(), graph)
                    longest = longest_held(launch.here(), self.settings)
                    self.done[text] = worker.submit(_compile, module, without_memory(tensors), longest).result()
            except Exception as error:
                if foreseen(error) or isinstance(error, CodaError):
                    raise
                log.info("Inductor fails on a program that is to be measured", exc_info=error)
                self.failed[text] = " ".join(f"{type(error).__name__}: {error}".split())[:SAID]
                forget_frames(error)
        if text in self.failed:
            raise Unsupported(f"Inductor fails on what is to be measured: {self.failed[text]}")
        return self.done[text]

    def computations(self, plan: Plan, group: Group, built: Built) -> list[Callable[[], object]]:
        """The small computations that a Region needs; their results become values of the group."""
        wanted = [c for c in group.computed(built) if c not in group.values]
        if not wanted:
            return []
        new, keys = small(plan, group, built, wanted)
        tensors = [group.value(key) if isinstance(key, fx.Node) else group.made(key) for key in keys]
        run = self.compiled(new, tensors)
        made = dict(zip(wanted, run(*tensors), strict=not group.taken))
        if group.taken:  # of random numbers a loop makes anything, an infinite exponential, say
            made |= {c: group.made(c) for c in wanted if c.extent == "token"}
        alike = [c for c in wanted if c.extent == "token" and plan.combined.get(c.term) == c.order]
        group.values |= made | {c.term: made[c] for c in alike}
        return [lambda: run(*tensors)]

    def passes(self, group: Group, nodes: Sequence[fx.Node], program: Program | None) -> list[Callable[[], object]]:
        """One of Inductor's programs, which has run once: what it makes, the `nodes`, become values of the group each
        time. None if there is no program."""
        if program is None:
            return []
        graph, given = program
        run = self.compiled(graph, [group.value(node) for node in given])

        def step() -> None:
            group.values.update(zip(nodes, run(*(group.value(node) for node in given)), strict=True))

        step()
        return [step]

    def baseline(self, group: Group, plan: Plan) -> Callable[[], object]:
        """The nodes of the user's graph, from the tensors that are there before the group runs."""
        graph, given = subgraph(group, plan)
        tensors = [group.value(node) for node in given]
        run = self.compiled(graph, tensors)
        return lambda: run(*tensors)


def as_in_the_whole(graph: fx.Graph, settings: Settings) -> None:
    """Does to a program what is done to the user's graph behind the Regions, in place."""
    if allowed(ELEMENTWISE, NAMES, settings):
        for write in (write_maxima, write_softmax_sums):
            write(graph, SM_90A.name, effects(graph))
    if allowed(COMPLEX, NAMES, settings):
        pack_pairs(graph, SM_90A.name)
    put_into_memory(graph, settings)


def without_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors that lie as these do. What Inductor holds on to after a compile, as the frames that a FailedMatch of
    its pattern matcher came through (torch 2.15), would keep real ones until the next collection of garbage."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(t) for t in tensors]


def _compile(module: fx.GraphModule, tensors: list[Tensor], longest: int) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = PLAINLY | ({"joint_custom_post_pass": CacheMark(longest)} if longest else {})
    with torch.no_grad():
        made = compile_fx(module, tensors, rows_held(compile_fx_inner, longest), config_patches=patches)
        return cast(Callable[..., Any], made)


def as_the_node(store: Tensor, node: fx.Node) -> Tensor:
    """What a Region stored, in the node's sizes and strides, for which programs that read it are compiled."""
    value = node.meta["val"]
    sizes, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    if store.dim() > 1 and not store.is_contiguous() and torch.empty(sizes, device="meta").stride() == (*strides,):
        return store.view(sizes)  # its rows lie farther apart, in the whole graph too
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if last >= store.numel() or store.dtype != value.dtype:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=store.device)
    return store.as_strided(sizes, strides)


def benchmarked(
    group: Group,
    built: Built,
    settings: Settings,
    anew: AbstractSet[fx.Node] = frozenset(),
    tile: Config | None = None,
) -> Callable[[], None]:
    """Tunes one Region on its real inputs, or takes the `tile`, leaves its outputs in the group's values, also those of
    the nodes that they replace, returns its launch. The nodes `anew` have another value each time. Ragged weights are
    copied each time, as in the whole graph."""
    inputs = group.inputs(built)
    if tile is None:
        kernel = tune.tuned(built.region, inputs, settings.cache_dir, hints=settings.hinted)
    else:
        kernel = tune.hinted(built.region, inputs, settings.cache_dir, tile)
    outs = blocks.outputs(built.region, inputs)
    kernel(inputs, outs)
    group.values |= dict(zip(outputs(built), outs, strict=True))
    for node, stored in built.draft.supplies.items():
        group.values[node] = as_the_node(group.values[stored], node)
    changing = [(i, s) for i, s in enumerate(built.inputs) if s in anew]
    copied = [(i, s) for i, s in enumerate(built.inputs) if isinstance(s, Weight) and s.ragged]

    def run() -> None:
        for i, source in changing:
            inputs[i] = group.input(built, i, source)
        for i, weight in copied:
            inputs[i].copy_(group.weight(built, weight))
        kernel(inputs, outs)

    return run


def in_order(steps: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """The steps as one call."""

    def run() -> None:
        for step in steps:
            step()

    return run
