"""What the page of `coda-inductor report` shows, as plain records: made of a study's facts, without any HTML.

Anchors: `g0-s12` is step 12 of graph 0, `g0-r3` its Region r3, `kernel-DIGEST` a generated module, `law-NAME` a law.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coda_inductor.explain import report as said
from coda_inductor.explain.modules import pattern, shared, starred

Facts = dict[str, Any]
AROUND = 3  # lines of the user's file before and after the one that is meant
LONGEST_RUN = 256  # steps of one layer
NAME = re.compile(r"(?<![\w.])((?:acc|y|s|o|p)\d+)([a-z]|\.\d+)?(?![\w.])")
"""What a listing calls a value by the step that makes it: acc3a, y12b, s8, o4, p2."""

NO_STEP: Facts = {"region": "", "digest": "", "what": "", "operations": "", "bytes": 0}
"""What only some steps have."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A piece of a formula; `to` is the anchor of the step that makes the value, empty if it is none's."""

    text: str
    to: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Steps that follow one another, as often as equal layers repeat them: one entry of `times` for each layer."""

    times: tuple[tuple[Facts, ...], ...]
    module: str


class Links:
    """The steps of one graph by the names of what they make."""

    def __init__(self, graph: int, steps: Sequence[Facts]) -> None:
        self.graph = graph
        self.ids = {s["id"] for s in steps}
        self.by_name: dict[str, str] = {}
        for step in steps:
            for made in (*step["products"], *step["stores"], *step["sums"]):
                self.by_name.setdefault(made["name"], self.step(step["id"]))
                if found := NAME.fullmatch(made["name"]):
                    self.by_name.setdefault(found[1], self.step(step["id"]))

    def step(self, number: int) -> str:
        """The anchor of a step."""
        return f"g{self.graph}-s{number}"

    def region(self, name: str) -> str:
        """The anchor of a Region."""
        return f"g{self.graph}-{name}"

    def text(self, formula: str, own: int = -1) -> list[Linked]:
        """A formula in pieces, its values linked to the steps that make them, but for those of its `own` step."""
        pieces, at = [], 0
        for found in NAME.finditer(formula):
            if (to := self.by_name.get(found[0], self.step(own))) != self.step(own):
                pieces += [Linked(formula[at : found.start()]), Linked(found[0], to)]
                at = found.end()
        return [p for p in (*pieces, Linked(formula[at:])) if p.text]

    def readers(self, to: Sequence[str]) -> list[Linked]:
        """Who reads a value: "[4]" is step 4; "output" is nobody's."""
        numbers = [(t, int(t[1:-1])) if t[1:-1].isdigit() else (t, -1) for t in dict.fromkeys(to)]
        return [Linked(t, self.step(n) if n in self.ids else "") for t, n in numbers]


@cache
def snippet(source: str) -> list[tuple[int, str, bool]]:
    """The lines around "file:line": (number, text, is it the one); empty if the file cannot be read."""
    path, _, number = source.rpartition(":")
    if not path or not number.isdigit():
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    line = int(number)
    around = range(max(1, line - AROUND), min(len(lines), line + AROUND) + 1)
    return [(i, lines[i - 1], i == line) for i in around] if line <= len(lines) else []


def runs(steps: Sequence[Facts]) -> Iterator[Run]:
    """The steps in order, what equal layers repeat as one Run; a step of no such layer is a Run of its own."""
    keys, modules, at = [_key(s) for s in steps], [s["module"] for s in steps], 0
    while at < len(steps):
        period, count = _repeats(keys, at)
        if count > 1 and modules[at : at + period] == modules[at + period :][:period]:
            period, count = 1, 1  # equal steps of one module are no layers
        times = [tuple(steps[at + i * period : at + (i + 1) * period]) for i in range(count)]
        yield Run(tuple(times), starred([_home(t) for t in times]))
        at += period * count


def _key(step: Facts) -> tuple[object, ...]:
    """What equal steps of equal layers have in common."""
    what = step["digest"] or step["what"] or step["operations"]
    shapes = tuple(s["type"] for s in step["stores"]), tuple(p["k"] for p in step["products"])
    return (step["kind"], what, pattern(step["module"]), step["source"], *step["laws"], *shapes)


def _repeats(keys: Sequence[object], at: int) -> tuple[int, int]:
    """(period, how often) of the repetition from here that covers most steps; of equal ones the shortest period."""
    best = (1, 1)
    for period in range(1, min((len(keys) - at) // 2, LONGEST_RUN) + 1):
        count = 1
        first = keys[at : at + period]
        while keys[at + count * period] == keys[at] and keys[at + count * period :][:period] == first:
            count += 1
            if at + (count + 1) * period > len(keys):
                break
        if count > 1 and count * period > best[0] * best[1]:
            best = period, count
    return best


def _home(steps: Sequence[Facts]) -> str:
    """The module that all of some steps lie in."""
    return ".".join(shared([s["module"].split(".") for s in steps if s["module"]]))


def graph_view(number: int, explained: Facts, program: Facts) -> Facts:
    """One graph: its steps in runs, its Regions in groups with the step of each, and what is left of it."""
    every = [NO_STEP | step for step in program["after"]]
    links, steps = Links(number, every), {s["region"]: s for s in every if s["region"]}
    regions = {r["id"]: r for r in explained["regions"]}
    groups = [
        {
            **group,
            "title": said.title(group),
            "first": regions[group["regions"][0]],
            "step": steps.get(group["regions"][0]),
            "members": [(regions[r], steps.get(r)) for r in group["regions"]],
        }
        for group in explained["groups"]
    ]
    whole = "; ".join(r["reason"] for r in explained["refused"] if not r["node"])
    return {
        "number": number,
        "kind": explained["kind"],
        "links": links,
        "untouched": program["untouched"],
        "runs": [*runs(every)],
        "steps": len(every),
        "groups": groups,
        "beside": _beside(explained),
        "whole": whole,
        "passes": said.same_passes(explained["passes"]),
        "refused": [(n, *what) for what, n in said.same_refusals(said.refused_alone(explained)).items()],
        "laws": _firings(program["laws"], links),
    }


def _beside(explained: Facts) -> list[tuple[str, str]]:
    """(what was rewritten beside the Regions, the line)."""
    found = Counter((f"table {t['shape']} computed once", t["source"]) for t in explained["tables"])
    for kind in ("casts", "elementwise"):
        found.update((f"tensor {t['shape']} {t['what']}", t["source"]) for t in explained[kind])
    found.update((said.blocks(b), b["source"]) for b in explained["blocks"])
    return [(f"{n} × {what}" if n > 1 else what, source) for (what, source), n in found.items()]


def _firings(laws: Sequence[Facts], links: Links) -> list[Facts]:
    """Firings of laws; those that are equal but for numbers, as of equal layers, once with how many there are."""
    same: dict[tuple[str, ...], list[Facts]] = {}
    for law in laws:
        shape = tuple(re.sub(r"\d+", "#", law[side]) for side in ("before", "after"))
        same.setdefault((law["law"], *shape), []).append(law)
    return [
        {
            "law": equal[0]["law"],
            "count": len(equal),
            "before": links.text(equal[0]["before"]),
            "after": links.text(equal[0]["after"]),
            "at": [piece for f in equal if f["at"] for piece in links.text(f["at"])],
        }
        for equal in same.values()
    ]
