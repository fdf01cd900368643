"""The report of `explain` as text for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coda_inductor.codegen.target import TARGETS
from coda_inductor.explain.modules import pattern, starred

Facts = dict[str, Any]
PASSES = "left to Inductor, with the first condition that failed"
ESTIMATE = "estimated: bytes over measured bandwidth; says nothing of the step"
NOTHING = "nothing follows a product that an epilogue could do"
COVERAGE = "the share of the bytes before that no kernel moves any more"
NAMED = 3  # ids of a group that are printed


def render(report: Facts, every: bool = False) -> str:
    """The report for people: totals first, then every graph's Regions, what is left, and what was refused. Equal
    Regions of equal layers are said once, unless `every` one is asked for."""
    lines = _totals(report)
    if report.get("mode") == "train" and report["graphs"] and all(g["kind"] == "inference" for g in report["graphs"]):
        lines.append("  nothing needs a gradient: this is inference")
    for i, graph in enumerate(report["graphs"]):
        lines.append(f"\ngraph {i} ({graph['kind']})")
        regions = {r["id"]: r for r in graph["regions"]}
        groups = [alone(r) for r in graph["regions"]] if every else graph["groups"]
        for group in groups:
            lines += _group(group, regions[group["regions"][0]])
        tables = Counter((t["shape"], t["source"]) for t in graph["tables"])
        lines += [f"  {plural(n, 'table')} {shape} computed once  {place(at)}" for (shape, at), n in tables.items()]
        casts = Counter((c["shape"], c["what"], c["source"]) for c in graph["casts"])
        lines += [f"  {plural(n, 'tensor')} {shape} {what}  {place(at)}" for (shape, what, at), n in casts.items()]
        passes = Counter((p["shape"], p["what"], p["source"]) for p in graph["elementwise"])
        lines += [f"  {plural(n, 'tensor')} {shape} {what}  {place(at)}" for (shape, what, at), n in passes.items()]
        lines += [f"  {blocks(b)}  {place(b['source'])}" for b in graph["blocks"]]
        masks = Counter((m["shape"], m["hides"], m["source"]) for m in graph["masks"])
        lines += [
            f"  {plural(n, 'mask')} {shape} left out, which {'hides' if n == 1 else 'hide'} {what}  {place(at)}"
            for (shape, what, at), n in masks.items()
        ]
        read = Counter((a["shape"], a["what"], a["source"]) for a in graph["grouped"])
        lines += [f"  {what} in {plural(n, 'attention')} {shape}  {place(at)}" for (shape, what, at), n in read.items()]
        whole = "; ".join(r["reason"] for r in graph["refused"] if not r["node"])
        lines += [f"  left to Inductor as a whole: {whole}"] if whole else []
        for title, rows in (
            ("its passes" if whole else PASSES, _passes(graph["passes"], whole)),
            ("refused", _refusals(refused_alone(graph))),
        ):
            lines += [f"  {title}:", *rows] if rows else []
    return "\n".join(lines)


def _totals(report: Facts) -> list[str]:
    """What was saved, a fact a line."""
    t = report["totals"]
    before, after, beside = t["bytes_before"], t["bytes_after"], t["bytes_epilogues"]
    first = f"for {spoken(report['target'])}: {plural(t['regions'], 'region')}" if "target" in report else ""
    rows = [("memory-bound bytes", changed(before, after))]
    rows += [("  of kernels", amounts(before, after - beside))]
    rows += [("  of epilogues", f"{amounts(beside)} beside their products")]
    rows += [("coverage", f"{t['coverage']:.1%}: {COVERAGE}".replace("%", " %", 1))]
    if report["estimates"]:
        times = ", ".join(f"{ms} on an {card}" for card, ms in estimated(report).items())
        rows.append(("memory-bound time", f"about {times}{percent(before, after)}  ({ESTIMATE})"))
    rows += [
        (
            "other kernels",
            f"{t['kernels_before']} -> {t['kernels_after']}, {t['passes_left']} of them over M x N tensors",
        )
    ]
    if t["saved_bytes_inductor"]:
        rows.append(("saved for backward", changed(t["saved_bytes_inductor"], t["saved_bytes"])))
    return [first, *(f"  {name:<22}{said}" for name, said in rows)]


def spoken(target: str) -> str:
    """A target's name, with what must be said of it."""
    caveat = TARGETS[target].caveat if target in TARGETS else ""
    return f"{target} ({caveat})" if caveat else target


def estimated(report: Facts) -> dict[str, str]:
    """By card: "2.8 -> 0.7 ms"."""
    return {e["card"]: f"{_ms(e['ms_before'])} -> {_ms(e['ms_after'])} ms" for e in report["estimates"]}


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 9.95 else f"{ms:.1f}" if ms >= 0.995 else f"{ms:.2g}"


def percent(before: float, after: float) -> str:
    """ ", -75 %"; nothing where there was nothing before, and never "-100 %" where something is left; of ten times and
    more how many."""
    if not before:
        return ""
    change = (after - before) / before
    if after >= 10 * before:
        return f", {after / before:.0f} times"
    said = f"{change:+.1%}" if after and change < -0.995 else f"{change:+.0%}"
    return f", {said}".replace("%", " %")


def changed(before: int, after: int) -> str:
    """Bytes before and after, and by how much they are less or more."""
    return amounts(before, after) + percent(before, after)


def alone(region: Facts) -> Facts:
    """A Region as a group of its own."""
    return {k: region[k] for k in ("module", "backward", "bytes_before", "bytes_after")} | {
        "regions": [region["id"]],
        "count": 1,
    }


def title(group: Facts) -> str:
    """layers.*.mlp.down_proj  x16  backward."""
    module = group["module"] or ids(group)
    times = f"  x{group['count']}" if group["count"] > 1 else ""
    return f"{module}{times}{'  backward' if group['backward'] else ''}"


def ids(group: Facts) -> str:
    """r0, r6, ... r90."""
    names = group["regions"]
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[: NAMED - 1])}, ... {names[-1]}"


def outputs(region: Facts) -> str:
    """The product's shape, and what leaves its epilogue."""
    counts = {"product": len(region["products"]), "store": len(region["stores"]), "sum": len(region["reductions"])}
    said = [plural(n, what) for what, n in counts.items() if n > (what == "product")]
    return f"[{region['m']}, {region['n']}] K={region['k']}: {', '.join(said)}"


def _group(group: Facts, first: Facts) -> list[str]:
    """Two lines: which module's products, and what becomes of them. The bytes are those of all of them."""
    named = f"  ({ids(group)})" if group["module"] else ""
    moved = "bare" if first["bare"] else changed(group["bytes_before"], group["bytes_after"])
    laws = f"  {'+'.join(first['laws'])}" if first["laws"] else ""
    return [
        f"  {title(group)}{named}",
        f"      {outputs(first):<46}  {moved}  {place(first['source'])}{laws}",
    ]


def refused_alone(graph: Facts) -> list[Facts]:
    """The refusals of one node that no pass that is left says already."""
    said = {(p["why"], p["source"]) for p in graph["passes"]}
    return [r for r in graph["refused"] if r["node"] and (r["reason"], r["source"]) not in said]


def blocks(b: Facts) -> str:
    """What is made by blocks of rows, and if it is only the gradient, why."""
    what = f"scores' gradient {b['shape']}" if b["whole"] else f"scores {b['shape']} and their gradient"
    return f"{what} in {b['count']} blocks of rows" + (f" (the scores stay whole: {b['whole']})" if b["whole"] else "")


def plural(count: int, what: str) -> str:
    """ "1 kernel", "2 kernels", "2 entries"."""
    if count == 1:
        return f"{count} {what}"
    return f"{count} {what[:-1]}ies" if what.endswith("ry") else f"{count} {what}s"


def place(source: str) -> str:
    """file:line as one reads it: below the working directory, or inside an installed package."""
    return source.removeprefix(os.getcwd() + os.sep).rpartition(f"site-packages{os.sep}")[2]


def amounts(*counts: int) -> str:
    """A number of bytes, or "before -> after": in one unit, that of the largest, but for what is less than a hundredth
    of it; to three digits (two of what is less than one)."""
    largest = _unit(max(counts))
    units = [largest if not c or 100 * c >= largest[0] else _unit(c) for c in counts]
    return " -> ".join(f"{_digits(c / unit)} {name}" for c, (unit, name) in zip(counts, units, strict=True))


def _unit(count: int) -> tuple[int, str]:
    return next((u for u in ((10**9, "GB"), (10**6, "MB")) if count >= u[0]), (10**3, "kB"))


def _digits(x: float) -> str:
    places = next((n for n, least in enumerate((99.95, 9.995, 0.995)) if x >= least), None)
    return f"{x:.2g}" if places is None else f"{x:.{places}f}"


def same_passes(passes: Sequence[Facts]) -> list[Facts]:
    """Equal passes of equal layers, of as many bytes as one reads, once: "module" has stars, "count" says how many."""
    same: dict[tuple[str, ...], list[Facts]] = {}
    for p in passes:
        key = (p["why"], p["source"], p["what"], pattern(p["module"]), amounts(p["bytes"]))
        same.setdefault(key, []).append(p)
    return [
        {**equal[0], "module": starred([p["module"] for p in equal]), "count": len(equal)} for equal in same.values()
    ]


def _passes(passes: Sequence[Facts], known: str) -> list[str]:
    """How many, the bytes of one, its module, the reason (unless `known`) and its line, the operations."""
    rows = []
    for p in same_passes(passes):
        said = [p["module"] or "", "" if p["why"] == known else p["why"], place(p["source"])]
        rows.append(f"    {p['count']:>3} x {amounts(p['bytes']):<9} {'  '.join(filter(None, said))}")
        rows.append(f"{'':<20}{p['what'] if len(p['what']) < 96 else p['what'][:92] + ' ...'}")
    return rows


def _refusals(refused: Sequence[Facts]) -> list[str]:
    return [f"    {n:>3} x {reason}  {place(at)}" for (reason, at), n in same_refusals(refused).items()]


def same_refusals(refused: Sequence[Facts]) -> Mapping[tuple[str, str], int]:
    """(reason, line) and how often."""
    return Counter((r["reason"], r["source"]) for r in refused)
