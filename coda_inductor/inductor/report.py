"""The report of `explain` as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]


def render(report: Facts) -> str:
    """The report for people: totals first, then every graph's regions, what is left, and what was refused."""
    t = report["totals"]
    kept = f"; saved for backward {_gb(t['saved_bytes_inductor'])} -> {_gb(t['saved_bytes'])}"
    lines = [
        f"{t['regions']} regions; memory-bound traffic {_gb(t['bytes_before'])} -> {_gb(t['bytes_after'])}"
        f" ({t['coverage']:.1%} of it absorbed); kernels {t['kernels_before']} -> {t['kernels_after']},"
        f" {t['passes_left']} of them over M x N tensors"
    ]
    lines[0] += kept if t["saved_bytes_inductor"] else ""
    for i, graph in enumerate(report["graphs"]):
        lines.append(f"\ngraph {i} ({graph['kind']})")
        for r in graph["regions"]:
            n_products = f"{len(r['products'])} products, " if len(r["products"]) > 1 else ""
            leaves = f"{len(r['stores'])} stores, {len(r['reductions'])} sums"
            what = f"[{r['m']}, {r['n']}] K={r['k']}: {n_products}{leaves}"
            laws = f"  {'+'.join(r['laws'])}" if r["laws"] else ""
            moved = f"{_gb(r['bytes_before'])} -> {_gb(r['bytes_after'])}"
            lines.append(f"  {r['id']:<12} {what:<52} {moved:<22} {r['source']}{laws}")
        for title, rows in (("left to Inductor", _grouped(graph["passes"])), ("refused", _refusals(graph["refused"]))):
            lines += [f"  {title}:", *rows] if rows else []
    return "\n".join(lines)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count / 1e6:.2f} MB"


def _grouped(passes: Sequence[Facts]) -> list[str]:
    """Equal passes of many layers on one line."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for p in passes:
        same.setdefault((p["what"], p["why"], p["source"]), []).append(p["bytes"])
    return [f"    {len(b)} x {_gb(b[0])}  {what[:80]}  ({why})  {at}" for (what, why, at), b in same.items()]


def _refusals(refused: Sequence[Facts]) -> list[str]:
    same = Counter((r["reason"], r["source"]) for r in refused)
    return [f"    {n} x {reason}  {at}" for (reason, at), n in same.items()]
