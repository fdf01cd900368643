"""The contest: before a Region enters a graph, it is timed against the operations that it replaces.

Regions that a law ties together (one reads another's sum, or a store that no node of the graph equals) stand or fall
as a group. The group runs as generated kernels, the same nodes of the user's graph as Inductor compiles them,
interleaved, on real tensors of the graph's sizes. What does not win by 2 % is derived again without the law, and if
that loses too it is left to Inductor. Results are kept on disk by content and never change.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.codegen import launch, legality, record, store, target, tune
from coda_inductor.codegen.prebuild import Job, prebuild
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import lowering
from coda_inductor.inductor.extract import computed, described, laid_out, put_off, small, subgraph
from coda_inductor.inductor.joint import Verdict, laws_of
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite import search
from coda_inductor.rewrite.build import Built, Source, Weight, build
from coda_inductor.rewrite.draft import Computed, Stored
from coda_inductor.rewrite.plan import Plan

log = logging.getLogger("coda_inductor.contest")

hint = functools.partial(lowering.hint, otherwise=None)
"""A size to measure at."""

WIN = 1.02  # Inductor's time over ours, at least
CLOSE = 1.15  # below, a law that wins is compared with what the group gains without it
ROUNDS = 25


@dataclass(slots=True)
class Group:
    """Regions tied by laws, in running order, and the values of one rehearsal (real tensors by node, store or sum)."""

    builts: list[Built]
    device: torch.device
    tokens: int
    values: dict[object, Any] = field(default_factory=dict)

    @property
    def mask(self) -> int:
        """The products of the group, as a bit set."""
        mask = 0
        for b in self.builts:
            mask |= b.draft.space.mask
        return mask

    def key(self, plan: Plan) -> str:
        """What the outcome depends on: both programs, what they run on, and the versions that compile them."""
        parts = [
            str(legality.bucket(self.tokens)),
            record.device_name(),
            record.sources_digest(),
            str(target.versions()),
        ]
        with torch.no_grad(), unset_fake_temporarily():
            for b in self.builts:
                parts += [b.region.text, *map(laid_out, b.inputs)]
                parts.append(described(*small(plan, self, b, computed(b))[0].nodes))
        parts += [described(*subgraph(self, plan)[0].nodes), *map(laid_out, put_off(self, plan))]
        return "contest-" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]

    def value(self, node: fx.Node) -> Any:
        """A tensor for a node that the group reads: random at the root of its views. Sizes are the hints."""
        if node not in self.values:
            if g.is_view(node):
                args = fx.map_arg(node.args, self.value)
                self.values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
            else:
                self.values[node] = sample(node, self.device)
        return self.values[node]

    def input(self, built: Built, i: int, source: Source) -> Tensor:
        """The real tensor of one input of a Region."""
        r = built.region
        if isinstance(source, Weight):
            whole = self.value(source.node)
            dim = 0 if r.products[0].b_layout == "nk" else 1
            return whole if source.stop is None else whole.narrow(dim, source.start, source.stop - source.start)  # type: ignore[no-any-return]
        if isinstance(source, Computed):
            return self.values[source]  # type: ignore[no-any-return]
        if isinstance(source, Stored) and source not in self.values:  # of a Region outside the group
            width = r.products[0].k if i < r.matrices else r.n
            self.values[source] = torch.randn(self.tokens, width, dtype=DTYPES[source.dtype], device=self.device)
        t = self.value(source) if isinstance(source, fx.Node) else self.made(source)
        if i < r.matrices:
            return t.reshape(-1, r.products[0].k)
        return t.reshape(-1, r.n) if r.operands[i - r.matrices].extent == "tile" else t.reshape(-1)

    def made(self, source: object) -> Tensor:
        """A store or sum of the group; the sum of a Region outside it is sampled."""
        if source not in self.values:
            self.values[source] = torch.empty(self.tokens, dtype=torch.float32, device=self.device).uniform_(0.5, 1.5)
        return self.values[source]  # type: ignore[no-any-return]


def sample(node: fx.Node, device: torch.device) -> Any:
    """Random values for a node's tensor, its hint for a symbolic size. Vectors over tokens are positive, as sums of
    squares are."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return hint(value)
    shape, stride = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    out = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
    if not value.dtype.is_floating_point:
        return out.zero_()
    if out.dim() > 1 and shape[-1] > 1:
        return out.normal_(std=shape[-1] ** -0.5 if g.is_weight(node) else 1.0)
    return out.uniform_(0.5, 1.5)


def groups(plan: Plan, builts: list[Built]) -> list[list[Built]]:
    """Regions that one cannot keep without the other, in running order: a store that no node equals ties its reader
    to its maker, and so does a sum to the product that was deferred for it. (A mean that only shifts what a later
    stream stores does not: without it there is another.)"""
    makers = {key: i for i, b in enumerate(builts) for key in outputs(b)}
    deferred = {f.product for f in plan.firings}
    leader = list(range(len(builts)))
    for i, b in enumerate(builts):
        waits = any(acc.bit in deferred for acc in b.draft.space.accs)
        for source in b.inputs:
            if isinstance(source, Stored) or (waits and isinstance(source, Term)):
                maker = makers[source]
                late, early = (plan.program.in_backward(x.draft.space) for x in (b, builts[maker]))
                if late and not early:
                    continue  # without the one the other keeps, or reads, what the user's graph has
                first, second = sorted((leader[i], leader[maker]))
                leader = [first if x == second else x for x in leader]
    return [[b for b, x in zip(builts, leader, strict=True) if x == i] for i in dict.fromkeys(leader)]


def outputs(built: Built) -> list[object]:
    """The keys of a Region's outputs, in order."""
    return [*built.draft.stores, *built.draft.sums]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group's products, as a bit set, and both times; none if it was not measured."""

    mask: int
    ms: float = 0.0
    baseline_ms: float = math.inf

    @property
    def loses(self) -> str:
        """Why the group is not kept; empty if it wins."""
        if self.baseline_ms >= WIN * self.ms:
            return ""
        return f"measured slower: {self.ms * 1e3:.0f} us fused, {self.baseline_ms * 1e3:.0f} us by Inductor"

    @property
    def ratio(self) -> float:
        """Inductor's time over ours."""
        return self.baseline_ms / self.ms if self.ms else math.inf

    @property
    def gain_ms(self) -> float:
        """What the group spares."""
        return self.baseline_ms - self.ms


class Contest:
    """Decides for one graph; called again whenever the derivation has changed, until nothing loses."""

    def __init__(self, settings: Settings, device: torch.device, failed: Callable[[Exception], None]) -> None:
        self.settings, self.device, self.failed = settings, device, failed
        self.rows: list[dict[str, Any]] = []
        self._compared = 0

    def __call__(self, plan: Plan, builts: list[Built]) -> Verdict:
        """The verdict on all Regions of a plan."""
        banned, undeferred, close = dict[int, str](), 0, dict[int, Outcome]()
        self.prebuild(plan, builts)
        for members in groups(plan, builts):
            bits = [acc.bit for b in members for acc in b.draft.space.accs]
            deferred = sum(1 << bit for bit in {f.product for f in plan.firings} & set(bits))
            try:
                outcome = self.outcome(plan, members)
            except Exception as error:  # a kernel that cannot be built or is wrong, or no memory to try it in
                if not isinstance(error, Unsupported) and not out_of_memory(error):
                    raise
                failure = unmeasured(error, plan.program.product(members[0].draft.space.accs[0]).node)
                self.failed(failure)
                banned |= dict.fromkeys(bits, failure.what)
                continue
            if outcome.loses and deferred:
                undeferred |= deferred
            elif outcome.loses:
                banned |= dict.fromkeys(bits, outcome.loses)
            elif deferred & ~self._compared and outcome.ratio < CLOSE:
                close[deferred] = outcome
        if close and not banned and not undeferred:
            undeferred = self.better_undeferred(plan, close)
        return Verdict(banned, undeferred)

    def better_undeferred(self, plan: Plan, close: dict[int, Outcome]) -> int:
        """The deferred products (a bit set) of narrow winners that gain more as the user wrote their operands: a norm
        in the L2 cache costs less than the sums and the longer epilogue that would replace it."""
        program, laws, bits = plan.program, laws_of(self.settings), functools.reduce(int.__or__, close)
        self._compared |= bits
        before = sum(1 << bit for bit in program.undeferred)
        other = search.plan(program.lifted, laws, dict(program.banned), before | bits)
        builts = [build(other, draft) for draft in other.unique()]
        covered = functools.reduce(int.__or__, (o.mask for o in close.values()))
        alike = [m for m in groups(other, builts) if any(b.draft.space.mask & covered for b in m)]
        self.prebuild(other, [b for members in alike for b in members])
        gains = list[Outcome]()
        for members in alike:
            try:
                gains.append(self.outcome(other, members))
            except Exception as error:  # without this group, then
                if not isinstance(error, Unsupported) and not out_of_memory(error):
                    raise
        found = 0
        for deferred, outcome in close.items():
            mine = (o.gain_ms for o in gains if o.mask & outcome.mask == o.mask and not o.loses)
            if sum(mine) > outcome.gain_ms:
                found |= deferred
        return found

    def prebuild(self, plan: Plan, builts: list[Built]) -> None:
        """Compiles what tuning will ask for, on all cores at once."""
        if self.settings.tune == "off":
            return
        directory, jobs = store.open_store(self.settings.cache_dir), []
        for region, built in {b.region: b for b in builts}.items():
            size = legality.bucket(hint(plan.program.product(built.draft.space.accs[0]).node.meta["val"].shape[0]))
            if record.remembered(directory, region, size) is None:
                jobs += [Job(region, config, False) for config in legality.candidates(region, size)]
        prebuild(jobs, self.settings.cache_dir)

    def outcome(self, plan: Plan, members: list[Built]) -> Outcome:
        """How a group fares; it wins if nothing is to be measured."""
        product = plan.program.product(members[0].draft.space.accs[0]).node
        group = Group(members, self.device, tokens := hint(product.meta["val"].shape[0]))
        if self.settings.tune == "off":
            for b in members:
                launch.kernel(b.region.text, self.settings.cache_dir).build(tokens)
            return Outcome(group.mask)
        directory, key = store.open_store(self.settings.cache_dir), group.key(plan)
        found = store.read_record(directory, key, timed)
        if found is None:
            measured = self.measure(group, plan)
            found = store.write_record(directory, key, measured, timed)
        self.rows.append(found)
        log.info("%s: fused %.4f ms, Inductor %.4f ms", "+".join(found["regions"]), found["ms"], found["baseline_ms"])
        return Outcome(group.mask, found["ms"], found["baseline_ms"])

    def measure(self, group: Group, plan: Plan) -> dict[str, Any]:
        """Tunes the group's kernels, then times both ways."""
        with torch.no_grad(), unset_fake_temporarily():
            steps = []
            for built in group.builts:
                steps += [*computations(plan, group, built), rehearse(group, built, self.settings.cache_dir)]
            # What the forward is spared is written by a pass of the backward that reads the same anyway.
            steps += [torch.empty_like(group.value(node)).zero_ for node in put_off(group, plan)]
            before = baseline(group, plan)

            def fused() -> None:
                for step in steps:
                    step()

            ms, baseline_ms = tune.interleaved([fused, before], ROUNDS)
        return {"regions": [b.region.digest for b in group.builts], "ms": ms, "baseline_ms": baseline_ms}


def timed(found: dict[str, Any]) -> bool:
    """Is this the record of a contest?"""
    return all(isinstance(found.get(name), float) for name in ("ms", "baseline_ms")) and "regions" in found


def unmeasured(error: Exception, product: fx.Node) -> Unsupported:
    """Why a group could not be measured, at which line of the user's, and what to do."""
    if isinstance(error, Unsupported):
        return Unsupported(error.what, where=error.where or g.source_line(product), hint=error.hint)
    what = "out of memory while it was measured"
    return Unsupported(
        what, where=g.source_line(product), hint="compile before memory is filled, or CODA_INDUCTOR_TUNE=off"
    )


def out_of_memory(error: Exception) -> bool:
    """Torch has a class for it, which Inductor wraps; the driver and cuBLAS say it in words."""
    full = isinstance(error, RuntimeError) and any(said in str(error) for said in ("out of memory", "ALLOC_FAILED"))
    return full or isinstance(error, torch.OutOfMemoryError)


def computations(plan: Plan, group: Group, built: Built) -> list[Callable[[], object]]:
    """The small computations that a Region needs, as Inductor compiles them; their results become values of the
    group."""
    wanted = [c for c in computed(built) if c not in group.values]
    if not wanted:
        return []
    new, keys = small(plan, group, built, wanted)
    tensors = [group.value(key) if isinstance(key, fx.Node) else group.made(key) for key in keys]
    run = compiled(fx.GraphModule(torch.nn.Module(), new), tensors)
    group.values |= dict(zip(wanted, run(*tensors), strict=True))
    return [lambda: run(*tensors)]


def rehearse(group: Group, built: Built, cache_dir: str | None) -> Callable[[], None]:
    """Tunes one Region on its real inputs, leaves its outputs in the group's values, returns its launch."""
    inputs = [group.input(built, i, s) for i, s in enumerate(built.inputs)]
    kernel = launch.kernel(built.region.text, cache_dir)
    size = legality.bucket(inputs[built.region.products[0].a].shape[0])
    if record.remembered(kernel.directory, built.region, size) is None:
        tune.tune(built.region, inputs, cache_dir)
    outs = tune.outputs(built.region, inputs)
    kernel(inputs, outs)
    group.values |= dict(zip(outputs(built), outs, strict=True))
    return lambda: kernel(inputs, outs)


def baseline(group: Group, plan: Plan) -> Callable[[], object]:
    """The same nodes of the user's graph as Inductor compiles them, from the tensors that are there before the group
    runs."""
    graph, given = subgraph(group, plan)
    tensors = [group.value(node) for node in given]
    run = compiled(fx.GraphModule(torch.nn.Module(), graph), tensors)
    return lambda: run(*tensors)


def compiled(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """The module as Inductor compiles it, in a thread of its own: the compile around us has its own contexts."""
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(_compile, module, tensors).result()


def _compile(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        made = compile_fx(module, tensors, config_patches={"joint_custom_pre_pass": None})
        return cast(Callable[..., Any], made)
