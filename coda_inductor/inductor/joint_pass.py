"""The pass as Inductor calls it: which target, what is allowed there, and what happens when something fails.

A failure is never silent and never fatal: the graph stays Inductor's, one warning says what and why, and under
CODA_INDUCTOR_STRICT=1 it is raised instead.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._logging import trace_structured

from coda_inductor.codegen import legality, target
from coda_inductor.core.errors import CodaError, Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import show
from coda_inductor.inductor import launching
from coda_inductor.inductor.contest import Contest
from coda_inductor.inductor.joint import LAW_NAMES, REGION_KINDS, Decide, Report, Verdict, rewrite

log = logging.getLogger("coda_inductor")

REPORTS: deque[Report] = deque(maxlen=64)
"""What the last rewrites of this process did; graphs that came from Inductor's cache are not rewritten again."""

SMALL = 256
"""Graphs traced with fewer tokens are left to Inductor on a GPU: at M = 1 and 16 the fused chain took 1.1x the time of
torch.compile's, at 64 and 256 0.9x (H200, 8B widths, CUDA graphs)."""


class CodaWarning(UserWarning):
    """Something of ours did not happen, and Inductor did it instead."""


class JointPass(CustomGraphPass):  # type: ignore[misc]
    """One instance for each compile, with its settings frozen. `chained` is a pass that the user had put there, run first."""

    def __init__(self, settings: Settings, chained: Any = None) -> None:
        settings.check_kinds(LAW_NAMES | REGION_KINDS)
        launching.register()
        launching.cache_dir[:] = [settings.cache_dir]
        self.settings, self.chained = settings, chained

    def __call__(self, graph: fx.Graph) -> None:
        if self.chained is not None:
            self.chained(graph)
        if not any(node.target in PRODUCTS for node in graph.nodes):
            return
        try:
            name, legal = resolve(self.settings, graph)
            decide = self._contest(graph) if name != "reference" else NO_CONTEST
            report = rewrite(graph, self.settings, name, legal, decide)
        except Exception as error:  # the outermost fallback: the graph is as it was
            if self.settings.strict:
                raise
            warn(error)
            return
        REPORTS.append(report)
        _log(report)

    def _contest(self, graph: fx.Graph) -> Decide:
        def failed(error: Exception) -> None:
            if self.settings.strict:
                raise error
            warn(error)

        return Contest(self.settings, _device(graph)[0], failed)

    def uuid(self) -> Any:
        """What Inductor's caches key on: all of our sources, the versions, and every setting that changes a graph."""
        chained = self.chained.uuid() if self.chained is not None else None
        return (sources_digest(), tuple(target.versions().items()), self.settings.key(), chained)


NO_CONTEST: Decide = lambda plan, builts: Verdict()  # noqa: E731
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def resolve(settings: Settings, graph: fx.Graph) -> tuple[str, Callable[[Region], None]]:
    """The target's name and its predicate of legal Regions. Raises Unsupported if there is none for the graph's device."""
    if settings.target == "reference":
        return "reference", lambda region: None
    device, tokens = _device(graph)
    if settings.target == "auto" and device.type != "cuda":
        raise Unsupported(f"no kernels are generated for {device.type}", hint="CODA_INDUCTOR_TARGET=reference runs Regions on torch")
    target.available(torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None)
    if tokens < SMALL:
        raise Unsupported(f"{tokens} tokens: below {SMALL} the graph is left to Inductor")
    return "sm_90a", legality.check


def _device(graph: fx.Graph) -> tuple[torch.device, int]:
    """Where the graph's products run, and the most rows that one of them has (by the hint, if symbolic)."""
    products = [n.meta["val"] for n in graph.nodes if n.target in PRODUCTS]
    rows = [m if isinstance(m, int) else int(m.node.hint or SMALL) for m in (p.shape[0] for p in products)]
    return products[0].device, max(rows)


_warned: set[str] = set()


def warn(error: Exception) -> None:
    """One warning for each distinct failure of a process."""
    text = f"left to Inductor: {error}" if isinstance(error, CodaError) else f"left to Inductor: {type(error).__name__}: {error}"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"coda_inductor: {text}", CodaWarning, stacklevel=2)
    log.info(text, exc_info=None if isinstance(error, Unsupported) else error)


def _log(report: Report) -> None:
    log.info("%d regions, %d refused, %.0f ms", len(report.sites), len(report.refused), report.seconds * 1e3)
    text = "\n\n".join(f"# {s.name} {s.source} {' '.join(s.laws)}\n{show(s.region, s.m)}" for s in report.sites)
    log.debug("%s", text)
    trace_structured("artifact", metadata_fn=lambda: {"name": "coda_regions", "encoding": "string"}, payload_fn=lambda: text)


@cache
def sources_digest() -> str:
    """The digest of every source file of the package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
