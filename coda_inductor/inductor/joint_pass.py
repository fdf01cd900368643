"""The pass as Inductor calls it: which target, what is allowed there, and what happens when something fails.

A failure is never silent and never fatal: the graph stays Inductor's, one warning says what and why, and under
CODA_INDUCTOR_STRICT=1 it is raised instead.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from coda_inductor.attention.windows import flash_is_there
from coda_inductor.codegen import legality, target
from coda_inductor.codegen.target import Target
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import (
    BUG,
    QUIETLY,
    STRICTLY,
    BrokenInvariant,
    CodaError,
    CodaWarning,
    Unsupported,
    forget_frames,
    warn,
)
from coda_inductor.core.project import at
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import notes
from coda_inductor.inductor.joint import WITHOUT_PRODUCTS, Stage, copies, rewrite
from coda_inductor.inductor.records import Report
from coda_inductor.inductor.tracing import passes, uuids
from coda_inductor.kernels import record, store
from coda_inductor.measure import free_memory
from coda_inductor.ops import attention, elementwise, gradients, loss, lowering
from coda_inductor.passes.switches import ATTENTION, ELEMENTWISE, LOSS, NAMES, POSITIONS, WINDOWS
from coda_inductor.patterns.graph import MATRIX_PRODUCTS, source_line
from coda_inductor.patterns.sizes import assumed
from coda_inductor.tuning import shipped
from coda_inductor.tuning.plain_products import PlainTuner
from coda_inductor.tuning.tuner import Tuner
from coda_inductor.tuning.verdicts import Decisions, Legal
from coda_inductor.write.aliases import Sharing, sharing

__all__ = ["REPORTS", "CodaWarning", "JointPass", "machine", "sources_digest"]

log = logging.getLogger("coda_inductor")

REPORTS: deque[Report] = deque(maxlen=64)
"""What the last rewrites of this process did; graphs that came from Inductor's cache are not rewritten again."""

SMALL = 256
"""Graphs traced with fewer tokens are left to Inductor on a GPU: at M = 1 and 16 the fused chain took 1.1x the time of
torch.compile's, at 64 0.90x and at 256 0.97x (H200, 8B widths, CUDA graphs, tiles by hand)."""

MANY = 1000  # nodes; three layers of Llama have 934 and take 3 s, of which one walk of the collector, 0.26, is a tenth
FROZEN = 10_000  # objects; Python 3.12 itself freezes 375 when it starts
DEVICE = "cuda"
MULTIPLIED = dict.fromkeys(DTYPES[name] for row in target.TARGETS.values() for name in row.multiplies)


def machine(settings: Settings, example_inputs: Sequence[Any]) -> Target | None:
    """The target of the inputs' card, None for the reference. Raises Unsupported if kernels can neither run nor be kept
    on this machine, whatever the graph."""
    if settings.target == "reference":
        return None
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == DEVICE]
    capability = target.capability(devices[0] if devices else None)
    row = row_for(settings, capability)
    target.available(capability, untested=True)
    store.open_store(settings.cache_dir)
    return row


def row_for(settings: Settings, capability: tuple[int, int] | None) -> Target:
    """The row by which kernels for a device of compute `capability` are made. Raises Unsupported if there is none, if
    the settings name another, or if no card like it has run any and the settings do not ask for them."""
    row = target.of_capability(capability, untested=True)
    if settings.target not in ("auto", row.name):
        what = f"the target {settings.target} is for another card than this one, whose target is {row.name}"
        raise Unsupported(what, hint="CODA_INDUCTOR_TARGET=auto takes the card's")
    if settings.target == "auto" and not row.tested:
        raise Unsupported(f"kernels for {row.name} are {row.caveat}: they are used if asked for", hint=opting_in(row))
    return row


def opting_in(row: Target) -> str:
    """How to get kernels that were not yet run on such a card, and what is asked for in return."""
    ways = f"CODA_INDUCTOR_TARGET={row.name} or options={{'target': '{row.name}'}}"
    report = f"please report what `coda-inductor doctor --check` prints{at('Issues')}"
    return f"{ways} uses each that agrees with the interpreter on this card; {report}"


def within(settings: Settings, row: Target) -> Settings:
    """The settings of one graph: on a target that was never run on a card, elementwise passes, whose kernels nothing
    compares there, stay with Inductor, and attention keeps the kernel that torch chose."""
    return (
        settings
        if row.tested
        else replace(settings, disable=settings.disable | {ELEMENTWISE, WINDOWS, POSITIONS, ATTENTION, LOSS})
    )


class JointPass(CustomGraphPass):
    """One instance for each compile, with its settings frozen. `chained`: passes that the user put there, run first."""

    def __init__(self, settings: Settings, chained: Any = None) -> None:
        settings.check_kinds(NAMES)
        lowering.register()
        elementwise.register()
        gradients.register()
        attention.register()
        loss.register()
        self.settings = settings
        self.chained = passes(chained)
        self.unsettled = self.rewrote = False
        """Did something fail that may succeed the next time? Has a graph been changed?"""
        self.left: tuple[fx.GraphModule, Sharing] | None = None
        """The last graph that this pass left to Inductor's patterns, and which of its results shared memory then."""

    def __call__(self, graph: fx.Graph) -> None:
        for theirs in self.chained:
            theirs(graph)
        note = notes.begin(graph, self.settings)
        done: Report | CodaError | None = None
        try:
            if any(node.target in MATRIX_PRODUCTS for node in graph.nodes):
                with uncollected_so_far(graph):
                    done = self._rewrite(graph)
            else:
                done = self._without_products(graph)
        except CodaError as error:
            done = error
            raise
        finally:
            note.end(done)
        self.left = note.module, sharing(note.module.graph)

    def _rewrite(self, graph: fx.Graph) -> Report | CodaError:
        """The report, or why the graph is left as it was."""
        module = notes.owner(graph)  # its graph is the restored one after a failure
        try:
            row, legal = resolve(self.settings, graph)
            settings = self.settings if row is None else within(self.settings, row)
            tuner = self._tuner(graph, settings, row) if row else None
            decisions = Decisions(legal)
            if tuner:
                decisions = Decisions(legal, tuner, PlainTuner(tuner))
            with free_memory.given_back(tuner.measurements.device) if tuner else contextlib.nullcontext():
                report = rewrite(graph, settings, row.name if row else "reference", decisions)
            if tuner:
                report = replace(report, timings=tuple(tuner.measurements.rows), backward=tuner.backward)
        except Exception as error:  # the outermost fallback
            failure = self.failed(error, module.graph, "a graph")
            return failure
        self.rewrote |= report.rewrote
        REPORTS.append(report)
        return report

    def _without_products(self, graph: fx.Graph) -> Report | None:
        """Of a graph without a product, long rows are read once, and what its backward reads is kept from what
        overwrites it, in any case. Returns the report if a kernel is ours."""
        module = notes.owner(graph)
        ways: list[tuple[Settings, str, tuple[Stage, ...]]] = [(self.settings, "reference", (copies,))]
        with contextlib.suppress(Unsupported):
            ways.insert(0, (*without_products(self.settings, graph), WITHOUT_PRODUCTS))
        for settings, name, stages in ways:
            try:
                report = rewrite(module.graph, settings, name, stages=stages)
            except Exception as error:
                self.failed(error, module.graph, "a graph")
                continue
            self.rewrote |= report.rewrote
            if not report.elementwise:
                return None
            REPORTS.append(report)
            return report
        return None

    def _tuner(self, graph: fx.Graph, settings: Settings, row: Target) -> Tuner:
        def lost(error: Exception) -> None:
            self.unsettled = True
            self.failed(error, graph, "a region")

        return Tuner(settings, device_and_tokens(graph)[0], lost, row)

    def failed(self, error: Exception, graph: fx.Graph, what: str) -> CodaError:
        """Raises the error under CODA_INDUCTOR_STRICT, else warns that `what` is left to Inductor. Says what happened,
        at which line of the user's, and what to do."""
        ours = error if isinstance(error, CodaError) else BrokenInvariant(f"{type(error).__name__}: {error}")
        bug = not isinstance(ours, Unsupported)
        self.unsettled |= bug
        hint = BUG if bug else STRICTLY if self.settings.strict else QUIETLY
        failure = type(ours)(ours.what, where=ours.where or line_of(graph), hint=ours.hint or hint)
        if self.settings.strict:
            raise failure from error
        log.info("%s is left to Inductor", what, exc_info=error)  # what is returned does not hold it, nor its frames
        warn(f"{what} is left to Inductor: {failure}")
        forget_frames(error)
        return failure

    def uuid(self) -> Any:
        """What Inductor's caches key on: all of our sources, the versions, and every setting that changes a graph.
        None: not to be cached, because a failure is to be tried again, or people want to read what happens."""
        theirs = uuids(self.chained)
        if self.unsettled or self.settings.debug_dir or theirs is None:
            return None
        told = shipped.digest(record.device_name()) if self.settings.hinted else ""
        said = sources_digest(), tuple(target.versions().items()), self.settings.key(), flash_is_there()
        return (*said, told, theirs)


def without_products(settings: Settings, graph: fx.Graph) -> tuple[Settings, str]:
    """The settings and the target of a graph without a product. Raises Unsupported where all graphs are left to
    Inductor, and off a GPU."""
    require_options(settings)
    if settings.target == "reference":
        return settings, settings.target
    tensors = (n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    device = next((x.device for x in tensors if x.device.type == DEVICE), None)
    if device is None:
        raise Unsupported(f"no kernels are generated but for {DEVICE}")
    row = row_for(settings, target.capability(device))
    return within(settings, row), row.name


@contextlib.contextmanager
def uncollected_so_far(graph: fx.Graph) -> Iterator[None]:
    """Keeps Python's collector from walking what is there by now, all that was traced, again and again: a tenth of the
    time of deriving 16 layers. It walks it once before: what is garbage by then would hold its memory meanwhile. What
    somebody else has frozen stays as it is."""
    if len(graph.nodes) < MANY or gc.get_freeze_count() >= FROZEN:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resolve(settings: Settings, graph: fx.Graph) -> tuple[Target | None, Legal]:
    """The target's row, None for "reference", and its predicate of legal Regions. Raises Unsupported if none is for
    this graph."""
    require_options(settings)
    if settings.target == "reference":
        return None, lambda record: None
    device = device_and_tokens(graph)[0]
    if device.type != DEVICE:
        hint = "CODA_INDUCTOR_TARGET=reference runs on torch"
        raise Unsupported(f"no kernels are generated for {device.type}", hint=hint)
    require_graph(graph)
    row = row_for(settings, target.capability(device))
    return row, partial(legality.check, target=row)


def require_options(settings: Settings) -> None:
    """Raises Unsupported for options under which every graph is left to Inductor."""
    if not settings.enabled:
        raise Unsupported("the backend is switched off", hint="CODA_INDUCTOR=1 switches it on")
    if inductor_config.cpp_wrapper:
        raise Unsupported("Inductor's C++ wrapper does not call our kernels", hint="set its option cpp_wrapper=False")


def require_graph(graph: fx.Graph) -> None:
    """Raises Unsupported for a graph that is left to Inductor on every machine, by its products' dtypes or rows."""
    dtypes = {n.meta["val"].dtype for n in graph.nodes if n.target in MATRIX_PRODUCTS}
    if not dtypes & MULTIPLIED.keys():
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        names = [str(dtype).removeprefix("torch.") for dtype in MULTIPLIED]
        multiplied = " and ".join(", ".join(names).rsplit(", ", 1))
        hint = f"kernels multiply {multiplied}: cast, or use autocast"
        raise Unsupported(f"its products are of {found}", hint=hint)
    tokens = device_and_tokens(graph)[1]
    if tokens < SMALL:
        raise Unsupported(
            f"{tokens} tokens (rows of its products), fewer than {SMALL}",
            hint="more sequences in a batch, or backend='inductor'",
        )


def device_and_tokens(graph: fx.Graph) -> tuple[torch.device, int]:
    """Where the graph's products run, and the most rows that one of them has, as far as is known."""
    products = [n.meta["val"] for n in graph.nodes if n.target in MATRIX_PRODUCTS]
    rows = [assumed(p.shape[0]) for p in products]
    return products[0].device, max(rows)


def line_of(graph: fx.Graph) -> str:
    """The user's line of the graph's first product."""
    products = (node for node in graph.nodes if node.target in MATRIX_PRODUCTS)
    return next(filter(None, map(source_line, products)), "")


@cache
def sources_digest() -> str:
    """The digest of every source file of the package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
