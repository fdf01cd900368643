"""The programs of `graph` as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from coda_inductor.explain.report import amounts, place, plural, spoken

Facts = dict[str, Any]
LEGEND = """[step] kind t=time. accN: accumulator of step N; yN, sN: stores and sums of its epilogue; oN: an opaque
operation's result; pN: a memory-bound pass's. A product and its epilogue are one moment, a pass a kernel of its own.
rN: a Region; by: the laws behind its products and sums; ->: the steps that read it. a, b, ...: several of one step."""


def render(facts: Facts, before: bool = False) -> str:
    """Every graph's steps, after the rewriting or before it, and the laws that fired."""
    parts = [f"# {line}" for line in LEGEND.splitlines()]
    for i, graph in enumerate(facts["graphs"]):
        steps = graph["before" if before else "after"]
        which = "as captured" if before else f"for {spoken(facts['target'])}"
        parts.append(f"\ngraph {i} ({graph['kind']}), {which}: {_count(steps)}")
        if graph["untouched"] and not before:
            parts.append(f"left untouched: {graph['untouched']}")
        parts += [_step(step) for step in steps]
        if graph["laws"] and not before:
            parts.append("\nlaws that fired, before and after:")
            parts += [_law(law) for law in graph["laws"]]
    return "\n".join(parts)


def _count(steps: Sequence[Facts]) -> str:
    gemms = [s for s in steps if s["kind"] == "gemm"]
    regions = sum("region" in s for s in gemms)
    passes = sum(s["kind"] == "pass" for s in steps)
    products = sum(len(s["products"]) for s in gemms)
    left = f"{passes} memory-bound pass{'' if passes == 1 else 'es'}"
    return f"{plural(products, 'product')} in {plural(len(gemms), 'kernel')} ({regions} of them Regions), {left}"


def _step(step: Facts) -> str:
    name = f" {step['region']}" if "region" in step else f" {step['what']}" if "what" in step else ""
    moved = f"  {amounts(step['bytes'])}" if "bytes" in step else ""
    laws = f"  by {', '.join(step['laws'])}" if step["laws"] else ""
    lines = [f"\n[{step['id']}] {step['kind']}{name} t={step['time']:g}  {place(step['source'])}{moved}{laws}"]
    shape = step.get("shape", "")
    lines += [f"    {p['name']}{shape} = {p['a']} @ {p['b']}  contract {p['k']}" for p in step["products"]]
    if step["loads"]:
        lines.append(_wrapped(f"    load {', '.join(step['loads'])}"))
    if step["kind"] == "pass":
        lines.append(_wrapped(f"    nodes {' '.join(step['nodes'])}"))
    lines += [_wrapped(f"    {line}") for line in step.get("statements", ())]
    for s in step["stores"]:
        to = f" -> {', '.join(dict.fromkeys(s['to']))}" if s["to"] else ""
        formula = f" = {s['formula']}" if s["formula"] else ""
        lines.append(f"    store {s['name']} {s['type']}{to}{formula}")
    for s in step["sums"]:
        to = f" -> {', '.join(dict.fromkeys(s['to']))}" if s["to"] else ""
        lines.append(f"    {s['name']} = {s['of']} over {s['over']} of {s['formula']}{to}")
    return "\n".join(lines)


def _law(law: Facts) -> str:
    at = f" at {law['at']}" if law["at"] else ""
    return f"  {law['law']}{at}\n    {law['before']}\n    -> {law['after']}"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 118, subsequent_indent="         ", break_long_words=False, break_on_hyphens=False)
