"""What people may read about each graph that was compiled: the log, tlparse's artifact, and CODA_INDUCTOR_DEBUG_DIR.

A folder for each graph: before.py and after.py (FX, as Inductor got it and gets it), regions.txt, kernels/*.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import fx
from torch._logging._internal import trace_structured

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.target import SM_90A, TARGETS, Target
from coda_inductor.core.elementwise import told as spelled
from coda_inductor.core.errors import BrokenInvariant, CodaError, Unsupported, warn
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import show
from coda_inductor.inductor.records import Report

log = logging.getLogger("coda_inductor")


@dataclass(slots=True)
class Note:
    """One graph's notes in the making; `folder` is where its files go, None: nowhere."""

    graph: fx.Graph
    module: fx.GraphModule
    folder: Path | None
    target: Target = SM_90A  # whose kernels are written down

    def end(self, done: Report | CodaError | None) -> None:
        """Writes what was `done`: a rewrite, nothing because of an error, or nothing as there is no matrix product."""
        text = told(done)
        log.debug("%s", text)
        trace_structured(
            "artifact", metadata_fn=lambda: {"name": "coda_regions", "encoding": "string"}, payload_fn=lambda: text
        )
        if isinstance(done, Report):
            log.info("%d regions, %d refused, %.0f ms", len(done.sites), len(done.refused), done.seconds * 1e3)
        if self.folder is None:
            return
        files = {"after.py": readable(self.module), "regions.txt": text}
        for site in done.sites if isinstance(done, Report) else ():
            files[f"kernels/{site.name}_{site.region.digest}.py"] = (
                f"# {site.name} {site.source}\n{kernel(site.region, self.target)}"
            )
        write(self.folder, files)


def begin(graph: fx.Graph, settings: Settings) -> Note:
    """Called before a graph is rewritten."""
    module = owner(graph)
    folder = None if settings.debug_dir is None else new_folder(Path(settings.debug_dir))
    if folder is not None:
        write(folder, {"before.py": readable(module)})
    return Note(graph, module, folder, TARGETS.get(settings.target, SM_90A))


def owner(graph: fx.Graph) -> fx.GraphModule:
    """The module whose graph it is."""
    if graph.owning_module is None:
        raise BrokenInvariant("Inductor gave a graph without a module")
    return graph.owning_module


def told(done: Report | CodaError | None) -> str:
    """The Regions and the refusals of a graph, or why it has none."""
    if done is None:
        return "left to Inductor: no matrix product\n"
    if isinstance(done, CodaError):
        return f"left to Inductor: {done}\n"
    parts = [f"# {s.name} {s.source} {' '.join(s.laws)}\n{show(s.region, s.m)}\n" for s in done.sites]
    parts += ["".join(f"stored: {t.node} {t.shape}  {t.source}\n" for t in done.tables)]
    parts += ["".join(f"{c.what}: {c.node} {c.shape}  {c.source}\n" for c in done.casts)]
    parts += ["".join(f"[{p.m}, {p.record.n}] {spelled(p.record)}  {p.source}\n" for p in done.elementwise)]
    parts += ["".join(f"in {b.count} blocks: {b.node} {b.shape}  {b.source}\n" for b in done.blocks)]
    parts += ["".join(f"mask that hides {m.hides}: {m.node} {m.shape}  {m.source}\n" for m in done.masks)]
    parts += ["".join(f"{a.what}: {a.node} {a.shape}  {a.source}\n" for a in done.grouped)]
    parts += ["".join(f"refused: {r.node}: {r.reason}  {r.source}\n" for r in done.refused)]
    return "\n".join(filter(None, parts)) or "left to Inductor: no region\n"


def readable(module: fx.GraphModule) -> str:
    """The graph as Python, with shapes and the user's lines."""
    return str(module.print_readable(print_output=False))


def kernel(region: Region, target: Target = SM_90A) -> str:
    """The generated module of a Region, or why there is none."""
    try:
        legality.check(region, target)
    except Unsupported as why:
        return f"# no kernel: {why}\n"
    return source.render(region, target)


def new_folder(root: Path) -> Path | None:
    """The first of root/graph_000, root/graph_001, ... that was not there; also when several processes ask."""
    number = len(list(root.glob("graph_*"))) if root.is_dir() else 0
    while True:
        folder = root / f"graph_{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not root.is_dir():
                warn(f"nothing is written for debugging: {root} is not a folder")
                return None
            number += 1
        except OSError as error:
            warn(f"nothing is written for debugging: {error}")
            return None


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes `files`, by path inside `folder`."""
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        warn(f"notes for debugging are missing: {error}")
