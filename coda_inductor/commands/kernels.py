"""`coda-inductor kernels`: the kernels that a model's Regions become on a target, on any machine.

Per distinct Region: its generated source, the tiles that would be tried, and with `build` what the compiler made of
them. Compiled kernels go to the store, where torch.compile finds them. Without a model: the kernels in the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import fx

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.target import Target, of_name
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.cache import EPILOGUE, entries, existing
from coda_inductor.commands.words import size, table
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.facts import rows_of
from coda_inductor.explain.offline import rewrite_for, target_of
from coda_inductor.explain.report import place, plural
from coda_inductor.inductor.records import Site
from coda_inductor.kernels import cubin, library, record
from coda_inductor.kernels.prebuild import Job, Outcome, outcomes

Facts = dict[str, Any]


def kernels(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Settings,
    wanted: str = "",
    build: Literal["", "first", "all"] = "",
) -> Facts:
    """The kernels of the model's Regions, or of the `wanted` one (an id of explain, or a digest's start). `build`:
    compile the tile that would run, or all that would be tried. Raises Unsupported if no Region is the wanted one."""
    target = of_name(target_of(settings))
    found, whole = sites(model, args, kwargs, mode, settings)
    alike = Counter(site.region.digest for _, site, _ in found)
    first: dict[str, tuple[str, Site, int]] = {}
    for named in found:
        if not wanted or wanted == named[0] or (len(wanted) >= 4 and named[1].region.digest.startswith(wanted)):
            first.setdefault(named[1].region.digest, named)
    if wanted and not first:
        raise Unsupported(f"no Region is called {wanted!r}", hint="take an id or a digest from explain or kernels")
    made: dict[Job, Outcome] = {}
    if build:
        jobs = [
            Job(site.region, c, target=target.name)
            for _, site, rows in first.values()
            for c in _tiles(site.region, rows, target, settings, build)
        ]
        made = outcomes(jobs, settings.cache_dir)
    rows = [generated(*named, target, settings, made) | {"count": alike[digest]} for digest, named in first.items()]
    return {"schema": 1, "target": target.name, "regions": rows, "left": whole}


def sites(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Settings,
) -> tuple[list[tuple[str, Site, int]], list[str]]:
    """(id, Region in its place, rows at the traced sizes) as explain has them; why whole graphs were left. The ids of
    a second graph begin with g1."""
    found: list[tuple[str, Site, int]] = []
    left: list[str] = []
    graphs = 0

    def on_graph(graph: fx.Graph) -> None:
        nonlocal graphs
        nodes = {n.name: n for n in graph.nodes}
        try:
            made = rewrite_for(graph, settings).sites
        except Unsupported as why:
            left.append(str(why))
            made = ()
        before = f"g{graphs}." if graphs else ""
        nodes |= {n.name: n for n in graph.nodes}
        found.extend((before + site.name, site, rows_of(site, nodes)) for site in made)
        graphs += 1

    capture(model, args, kwargs, mode, on_graph, settings)
    return found, left


def _tiles(region: Region, rows: int, target: Target, settings: Settings, build: str) -> tuple[Config, ...]:
    """What to compile: everything that tuning would try, or what a launch would take."""
    every = legality.candidates(region, rows, target)
    if build == "all":
        return every
    chosen = _chosen(region, rows, target, settings)
    return (chosen,) if chosen else every[:1]


def _chosen(region: Region, rows: int, target: Target, settings: Settings) -> Config | None:
    """The tile that was measured best for so many rows, if one is remembered."""
    store, size = existing(settings.cache_dir), legality.size_class(region, rows, target)
    return record.remembered(store, region, size, target=target) if store else None


def generated(
    name: str, site: Site, rows: int, target: Target, settings: Settings, made: Mapping[Job, Outcome]
) -> Facts:
    """One Region: where it stands, its kernel's text, its tiles, and what was measured of it."""
    region, store = site.region, existing(settings.cache_dir)
    text = source.render(region, target)
    module = source.module_name(text)
    path = store / "epilogues" / f"{module}.py" if store else None
    size, chosen = legality.size_class(region, rows, target), _chosen(region, rows, target, settings)
    tiles = []
    for config in dict.fromkeys([*legality.candidates(region, rows, target), *([chosen] if chosen else [])]):
        outcome = made.get(Job(region, config, target=target.name))
        row = {"tile": str(config), "stages": legality.stages(region, config, target).ab, "chosen": config == chosen}
        row |= compiled(library.folder(region, config, store, target=target) if store else None)
        row |= {"seconds": outcome and outcome.seconds, "why": outcome.reason if outcome else ""}
        tiles.append(row)
    measured = [e.row() for e in (entries(store) if store else ()) if e.kind == "tuning"]
    return {
        "id": name,
        "digest": region.digest,
        "m": site.m,
        "n": region.n,
        "k": max(region.ks.values()),
        "products": sum(len(p.pairs) for p in region.products),
        "source": site.source,
        "kernel": module.removeprefix(EPILOGUE),
        "path": str(path) if path and path.exists() else None,
        "text": text,
        "bucket": size,
        "tiles": tiles,
        "records": [r for r in measured if r["digest"] == region.digest and r["bucket"] == size],
    }


def compiled(folder: Path | None) -> Facts:
    """Registers and bytes of stack per thread of the last kernel in a folder of the store, read from its machine code;
    None if there is none. Stack is spilled registers: kernels of ours have no local arrays."""
    objects = sorted(folder.rglob("*.o"), key=_made) if folder else []
    code = objects[-1].read_bytes() if objects else b""
    return {"registers": cubin.registers(code), "stack": cubin.stack_bytes(code)}


def _made(path: Path) -> float:
    return path.stat().st_mtime


def stored(settings: Settings, target: str | None = None) -> Facts:
    """The kernels in the store, or only those of a target."""
    store = existing(settings.cache_dir)
    rows = []
    for entry in entries(store) if store else ():
        if entry.kind == "kernel" and target in (None, entry.facts["device"]):
            module = EPILOGUE + entry.names[0]
            path = next((str(p) for p in entry.paths if p.suffix == ".py"), None)
            text = Path(path).read_text() if path else ""
            tiles = [
                {"tile": folder.name.removeprefix(f"{module}-"), **compiled(form)}
                for folder in entry.paths
                if folder.is_dir() and not folder.is_symlink()
                for form in (sorted(folder.iterdir()) or [folder])
            ]
            row = {"kernel": entry.names[0], "path": path, "text": text, "bytes": entry.bytes, "tiles": tiles}
            rows.append(row | {"target": entry.facts["device"]})
    return {"schema": 1, "kernels": rows}


TILES = """a tile of 128x192pp2x1: 128 rows and 192 columns a block, 2 x 1 blocks share their loads; pp: two warp groups
take turns on tiles (co: they halve each), n at the end: the epilogue goes along N first"""
HEAD = ("tile", "stages", "registers", "stack", "compiled in", "")


def render(facts: Facts, with_source: bool) -> str:
    """A paragraph per kernel; `with_source`: and its generated module."""
    if "kernels" in facts:
        return _render_stored(facts, with_source)
    lines = [f"for {facts['target']} ({caveat})"] if (caveat := of_name(facts["target"]).caveat) else []
    lines += [f"left to Inductor as a whole: {why}" for why in facts["left"]]
    for r in facts["regions"]:
        pair = f", {r['products']} products" if r["products"] > 1 else ""
        times = f"  x {r['count']}" if r["count"] > 1 else ""
        lines.append(f"{r['id']}  {r['digest']}  [{r['m']}, {r['n']}] K={r['k']}{pair}{times}  {place(r['source'])}")
        lines.append(f"    kernel {r['kernel']}  {r['path'] or '(not written yet)'}")
        rows = [
            (t["tile"], t["stages"], t["registers"], t["stack"], _seconds(t["seconds"]), t["why"] or _mark(t))
            for t in r["tiles"]
        ]
        lines += table([HEAD, *rows], "    ")
        for found in r["records"]:
            device = found["device"] or "an unknown device"
            lines.append(f"    measured: {_ms(found['ms'])} up to {found['bucket']} rows on {device}")
        lines += _text(r["text"]) if with_source else []
    if not facts["regions"]:
        return "\n".join([*lines, "no Region, and no kernel of ours"])
    total = sum(r["count"] for r in facts["regions"])
    distinct = plural(len(facts["regions"]), "distinct Region")
    return "\n".join([*lines, f"{distinct} of {total}; registers and stack bytes are per thread", TILES])


def _render_stored(facts: Facts, with_source: bool) -> str:
    lines = []
    for r in facts["kernels"]:
        lines.append(f"{r['kernel']}  {r['target']}  {size(r['bytes'])}  {r['path'] or '(no source)'}")
        rows = [(t["tile"], t["registers"], t["stack"]) for t in r["tiles"]]
        lines += table([("tile", "registers", "stack"), *rows] if rows else [], "    ")
        lines += _text(r["text"]) if with_source else []
    return "\n".join([*lines, f"{plural(len(facts['kernels']), 'kernel')} in the store"])


def _text(text: str) -> list[str]:
    return ["", *(f"    | {line}".rstrip() for line in text.splitlines()), ""]


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} s"


def _mark(tile: Facts) -> str:
    return "chosen by measurement" if tile["chosen"] else ""


def _ms(value: Any) -> str:
    return f"{value:.3f} ms" if isinstance(value, int | float) else "? ms"
