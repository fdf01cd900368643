"""The report of `explain` as text for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]
PASSES = "left to Inductor, with the first condition that failed"


def render(report: Facts) -> str:
    """The report for people: totals first, then every graph's regions, what is left, and what was refused."""
    t = report["totals"]
    kept = f"; saved for backward {amounts(t['saved_bytes_inductor'], t['saved_bytes'])}"
    beside = t["bytes_epilogues"]
    lines = [
        f"{t['regions']} regions; memory-bound traffic {amounts(t['bytes_before'], t['bytes_after'])}:"
        f" what moved {t['coverage']:.1%} of the {amounts(t['bytes_before'])} is no kernel any more, other kernels move"
        f" {amounts(t['bytes_after'] - beside)}, epilogues {amounts(beside)} beside their products;"
        f" kernels {t['kernels_before']} -> {t['kernels_after']}, {t['passes_left']} of them over M x N tensors"
    ]
    lines[0] = f"for {report['target']}: {lines[0]}" if "target" in report else lines[0]
    lines[0] += kept if t["saved_bytes_inductor"] else ""
    for i, graph in enumerate(report["graphs"]):
        lines.append(f"\ngraph {i} ({graph['kind']})")
        for r in graph["regions"]:
            n_products = f"{len(r['products'])} products, " if len(r["products"]) > 1 else ""
            leaves = f"{plural(len(r['stores']), 'store')}, {plural(len(r['reductions']), 'sum')}"
            what = f"[{r['m']}, {r['n']}] K={r['k']}: {n_products}{leaves}"
            laws = f"  {'+'.join(r['laws'])}" if r["laws"] else ""
            moved = amounts(r["bytes_before"], r["bytes_after"]) if not r["bare"] else "bare"
            lines.append(f"  {r['id']:<12} {what:<52} {moved:<22} {place(r['source'])}{laws}")
        tables = Counter((t["shape"], t["source"]) for t in graph["tables"])
        lines += [f"  {plural(n, 'table')} {shape} computed once  {place(at)}" for (shape, at), n in tables.items()]
        casts = Counter((c["shape"], c["what"], c["source"]) for c in graph["casts"])
        lines += [f"  {plural(n, 'tensor')} {shape} {what}  {place(at)}" for (shape, what, at), n in casts.items()]
        passes = Counter((p["shape"], p["what"], p["source"]) for p in graph["elementwise"])
        lines += [f"  {plural(n, 'tensor')} {shape} {what}  {place(at)}" for (shape, what, at), n in passes.items()]
        lines += [f"  {_blocks(b)}  {place(b['source'])}" for b in graph["blocks"]]
        said = {(p["why"], p["source"]) for p in graph["passes"]}
        whole = "; ".join(r["reason"] for r in graph["refused"] if not r["node"])
        alone = [r for r in graph["refused"] if r["node"] and (r["reason"], r["source"]) not in said]
        lines += [f"  left to Inductor as a whole: {whole}"] if whole else []
        for title, rows in (
            ("its passes" if whole else PASSES, _passes(graph["passes"], whole)),
            ("refused", _refusals(alone)),
        ):
            lines += [f"  {title}:", *rows] if rows else []
    return "\n".join(lines)


def _blocks(b: Facts) -> str:
    """What is made by blocks of rows, and if it is only the gradient, why."""
    what = f"scores' gradient {b['shape']}" if b["whole"] else f"scores {b['shape']} and their gradient"
    return f"{what} in {b['count']} blocks of rows" + (f" (the scores stay whole: {b['whole']})" if b["whole"] else "")


def plural(count: int, what: str) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def place(source: str) -> str:
    """file:line as one reads it: below the working directory, or inside an installed package."""
    return source.removeprefix(os.getcwd() + os.sep).rpartition(f"site-packages{os.sep}")[2]


def amounts(*counts: int) -> str:
    """A number of bytes, or "before -> after": in one unit, that of the largest, to three digits (two of what is less
    than one)."""
    unit, name = next((u for u in ((10**9, "GB"), (10**6, "MB")) if max(counts) >= u[0]), (10**3, "kB"))
    return " -> ".join(f"{_digits(c / unit)} {name}" for c in counts)


def _digits(x: float) -> str:
    places = next((n for n, least in enumerate((99.95, 9.995, 0.995)) if x >= least), None)
    return f"{x:.2g}" if places is None else f"{x:.{places}f}"


def _passes(passes: Sequence[Facts], known: str) -> list[str]:
    """Equal passes of many layers once: how many, the bytes of one, the reason (unless `known`) and its line, the
    operations."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for p in passes:
        same.setdefault((p["why"], p["source"], p["what"]), []).append(p["bytes"])
    rows = []
    for (why, at, what), moved in same.items():
        rows.append(f"    {len(moved):>3} x {amounts(moved[0]):<9} {'' if why == known else why + '  '}{place(at)}")
        rows.append(f"{'':<20}{what if len(what) < 96 else what[:92] + ' ...'}")
    return rows


def _refusals(refused: Sequence[Facts]) -> list[str]:
    same = Counter((r["reason"], r["source"]) for r in refused)
    return [f"    {n:>3} x {reason}  {place(at)}" for (reason, at), n in same.items()]
