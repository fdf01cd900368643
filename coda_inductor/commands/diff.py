"""`coda-inductor diff`: a model's outputs, gradients and what it overwrites, by coda and by Inductor, against float64.

The model runs, on the device of its tensors. Both backends and eager get the same weights, inputs and random numbers.
Status 1 if a tensor of coda's is WRONG: its error is more than FACTOR times Inductor's (off.py), or it is not finite
where the reference is, or its shape, dtype, strides or what it shares memory with are others than Inductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from coda_inductor.commands.differences.bisect import bisect, say_culprit
from coda_inductor.commands.differences.off import FACTOR, Off, allowed, floor, lost, off, times, verdict
from coda_inductor.commands.differences.reached import Subject
from coda_inductor.commands.differences.runs import (
    OVERWRITTEN,
    Against,
    Found,
    Mode,
    Reference,
    Run,
    compiled,
    reference,
)
from coda_inductor.commands.progress import Say, progress
from coda_inductor.commands.words import table
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import NO_GRAPH, WHERE
from coda_inductor.explain.report import plural

Facts = dict[str, Any]
ROWS = 20  # of tensors, in the text
NOT_COMPARED = "not compared: "
HEAD = ("tensor", "shape", "coda", "Inductor", "ratio", "largest", "")


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs that coda's is compared with, `reference` None if that is Inductor's alone. `narrowest`: of the dtypes
    that the model computes in, the one of the fewest bits."""

    subject: Subject
    mode: Mode
    settings: Settings
    inductor: Run
    reference: Reference | None
    narrowest: torch.dtype

    @property
    def wanted(self) -> Run:
        """The run that is taken for right."""
        return self.reference.run if self.reference else self.inductor

    def row(self, name: str, ours: Run) -> Facts:
        """What there is to say about one tensor: its facts, with "wrong" and "verdict"."""
        found, theirs, wanted = (self.of(run, name) for run in (ours, self.inductor, self.wanted))
        lacking = [who for who, x in (("coda", found), ("Inductor", theirs), ("the reference", wanted)) if x is None]
        some = next(x for x in (found, theirs, wanted) if x)
        dtype = str(some.value.dtype).removeprefix("torch.")
        facts: Facts = {"tensor": name, "kind": some.kind, "shape": list(some.value.shape), "dtype": dtype}
        if not (found and theirs and wanted):
            wrong = (found is None) != (theirs is None)
            said = f"{'WRONG: ' if wrong else NOT_COMPARED}{' and '.join(lacking)} gave none"
            return facts | {"wrong": wrong, "rank": math.inf if wrong else 0.0, "verdict": said}
        if other := unlike(found, theirs, wanted):
            return facts | {"wrong": True, "rank": math.inf, "verdict": f"WRONG: {other}"}
        if theirs.value.shape != wanted.value.shape:
            return facts | {
                "wrong": False,
                "rank": 0.0,
                "verdict": f"{NOT_COMPARED}another shape than eager's, as Inductor's",
            }
        device = self.subject.device()
        our = off(found.value, wanted.value, device)
        their = off(theirs.value, wanted.value, device) if self.reference else None
        least = floor(found.value, self.narrowest, our, their)
        same = torch.equal(found.value, theirs.value)
        by_us = lost(found.value, wanted.value)
        if self.reference:
            by_us &= ~lost(theirs.value, wanted.value)
        said = verdict(our, their, least, same, int(by_us.sum()))
        facts |= {"coda": number(our.error), "inductor": number(their.error) if their else None}
        facts |= {"allowed": number(allowed(their, least)), "largest": our.largest, "at": list(our.at)}
        facts |= {"not_finite": our.lost, "inductor_not_finite": their.lost if their else None}
        rank = ratio(our, their) if their else our.error
        facts |= {"ratio": number(rank) if their else None}
        if not (our.error and math.isfinite(rank)):  # one of both is exact
            rank = our.error / least if least else our.error
        return facts | {"wrong": said.startswith("WRONG"), "rank": math.inf if our.lost else rank, "verdict": said}

    def of(self, run: Run, name: str) -> Found | None:
        """A tensor after a run. One that this run did not overwrite is as it was before."""
        if name in run.found or not name.endswith(f", {OVERWRITTEN}"):
            return run.found.get(name)
        first = name.removesuffix(f", {OVERWRITTEN}")
        if first not in self.subject.layouts:
            return None
        return Found(OVERWRITTEN, self.subject.as_it_was(first, None))


def diff(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: Mode,
    settings: Settings,
    against: Against = "float64",
    bisecting: bool = False,
    shown: bool = False,
) -> Facts:
    """The facts about every tensor that model(*args, **kwargs) leaves, the worst first. `shown`: what is being done is
    said on a terminal. Raises Unsupported for a target that the model's tensors do not lie on."""
    subject = Subject(model, args, kwargs)
    settings = placed(subject, settings)
    with progress("eager", shown=shown) as say:
        say(f"eager in {against}" if against != "inductor" else "eager")
        right = None if against == "inductor" else reference(subject, mode, against)
        say("torch.compile, Inductor")
        theirs = compiled(subject, mode, "inductor")
        say("torch.compile, coda")
        ours = compiled(subject, mode, "coda", settings)
        say("comparing")
        compared = Compared(subject, mode, settings, theirs, right, narrowest(subject, ours))
        facts = judged(compared, ours)
        if bisecting:
            facts["bisect"] = culprit(compared, ours, facts, say)
    subject.put_back()
    return facts


def placed(subject: Subject, settings: Settings) -> Settings:
    """The settings with a target on which the model's tensors can be: the reference on a CPU."""
    if subject.device().type != "cpu":
        return settings
    if settings.target not in ("auto", "reference"):
        what = f"the model's tensors lie on the CPU, where {settings.target} does not run"
        raise Unsupported(what, hint="--target reference runs on torch; or put the model on a GPU")
    return replace(settings, target="reference")


def narrowest(subject: Subject, ours: Run) -> torch.dtype:
    """Among the model's tensors and its products, which autocast may round: but for 8 bits."""
    products = {DTYPES[site.region.dtype] for report in ours.reports for site in report.sites}
    found = {dtype for dtype in (subject.narrowest(), *products) if dtype.itemsize > 1}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def judged(compared: Compared, ours: Run) -> Facts:
    """The facts of three runs."""
    inductor, wanted = compared.inductor, compared.wanted
    names = dict.fromkeys([*wanted.found, *inductor.found, *ours.found])
    rows = [compared.row(name, ours) for name in names]
    rows.sort(key=lambda row: (not row["wrong"], -row["rank"]))
    unjudged = [
        f"{row['tensor']}: {row['verdict'].removeprefix(NOT_COMPARED)}"
        for row in rows if row["verdict"].startswith(NOT_COMPARED)
    ]  # fmt: skip
    problems = [f"{row['tensor']}: {row['verdict'].removeprefix('WRONG: ')}" for row in rows if row["wrong"]]
    keys = dict.fromkeys([*inductor.others, *ours.others])
    other = {key: (inductor.others.get(key, "nothing"), ours.others.get(key, "nothing")) for key in keys}
    problems += [f"{key} is {b} by coda and {a} by Inductor" for key, (a, b) in other.items() if a != b]
    for names_shared in sorted(map(sorted, ours.sharing ^ inductor.sharing)):
        by, not_by = ("coda", "Inductor") if frozenset(names_shared) in ours.sharing else ("Inductor", "coda")
        problems.append(f"{' and '.join(names_shared)} share memory by {by}, and not so by {not_by}")
    right = compared.reference
    return {
        "schema": 1,
        "mode": compared.mode,
        "device": str(compared.subject.device()),
        "target": compared.settings.target,
        "reference": right.name if right else "inductor",
        "why": right.why if right else "",
        "factor": FACTOR,
        "loss": ours.loss,
        "regions": sum(len(report.sites) for report in ours.reports),
        "graphs": ours.graphs,
        "warnings": ours.warnings,
        "tensors": [{**row, "rank": number(row["rank"])} for row in rows],
        "not_compared": list(dict.fromkeys([*unjudged, *wanted.unseen, *inductor.unseen, *ours.unseen])),
        "problems": problems or ([] if rows else ["the model leaves no tensor that could be compared"]),
    }


def culprit(compared: Compared, ours: Run, facts: Facts, say: Say) -> Facts:
    """What makes the worst tensor wrong: `bisect` over compiles of which each leaves some names out."""
    wrong = [row["tensor"] for row in facts["tensors"] if row["wrong"]]
    if not wrong:
        return {"tensor": "", "said": "no tensor is wrong"}
    settings = compared.settings

    def tried(names: frozenset[str]) -> tuple[bool, Run]:
        chosen = replace(settings, disable=settings.disable | names)
        run = compiled(compared.subject, compared.mode, "coda", chosen)
        return not compared.row(wrong[0], run)["wrong"], run

    return {"tensor": wrong[0]} | bisect(tried, ours, settings, compared.subject.device(), say)


def unlike(found: Found, theirs: Found, wanted: Found) -> str:
    """What is another of coda's tensor than of Inductor's, or of both than of eager's; empty if nothing."""
    ours, other = found.value, theirs.value
    if ours.shape != other.shape:
        return f"shape {list(ours.shape)}, Inductor's is {list(other.shape)}"
    if ours.dtype != other.dtype:
        return f"dtype {ours.dtype}, Inductor's is {other.dtype}"
    if found.strides != theirs.strides and found.strides != wanted.strides:
        return f"strides {found.strides}, Inductor's are {theirs.strides}"
    return ""


def ratio(ours: Off, theirs: Off) -> float:
    """Coda's error over Inductor's; 1 if both are exact."""
    if not theirs.error:
        return math.inf if ours.error else 1.0
    return ours.error / theirs.error


def number(x: float) -> float | str:
    """For JSON, which has no infinity."""
    return x if math.isfinite(x) else str(x)


def render(facts: Facts) -> str:
    """The worst tensors as a table, what else is another, and what bisection found."""
    rows, problems = facts["tensors"], facts["problems"]
    against = {"inductor": "Inductor alone", "eager": "eager in the model's own dtypes"}
    right = against.get(facts["reference"], facts["reference"])
    kept = plural(facts["regions"], "Region") if facts["regions"] else "no Region: everything was left to Inductor"
    kept = kept if facts["graphs"] else f"{NO_GRAPH} ({WHERE})"
    lines = [f"{facts['mode']} on {facts['device']}, target {facts['target']}, against {right}; {kept}"]
    lines += [facts["why"]] if facts["why"] else []
    lines += [f"loss: {facts['loss']}"] if facts["loss"] else []
    lines += [f"warning: {text}" for text in facts["warnings"]]
    cells = [_cells(row) for row in rows[:ROWS]]
    lines += ["", *table([HEAD, *cells])] if rows else ["the model returns no tensor and overwrites none"]
    if len(rows) > ROWS:
        lines.append(f"and {len(rows) - ROWS} more below {_times(rows[ROWS - 1]['rank'])}")
    lines.append("")
    named = {row["tensor"] for row in rows if row["wrong"]}
    lines += [p for p in problems if p.partition(": ")[0] not in named]
    lines += [f"not compared: {name}" for name in facts["not_compared"]]
    if problems:
        lines.append(f"{plural(len(problems), 'problem')}; coda's error may be {facts['factor']} times Inductor's")
    else:
        said = "nothing that was compared is wrong" if facts["not_compared"] else "nothing is wrong"
        most = f"error is at most {facts['factor']} times Inductor's, or"
        least = "difference from Inductor is" if facts["reference"] == "inductor" else most
        lines.append(f"{said}: every {least} below the floor")
    if "bisect" in facts:
        lines += ["", *say_culprit(facts["bisect"])]
    return "\n".join(lines)


def _cells(row: Facts) -> tuple[Any, ...]:
    shape = f"{row['dtype']}{row['shape']}"
    if "coda" not in row:
        return (row["tensor"], shape, None, None, None, None, row["verdict"])
    said = _error(row["coda"]), _error(row["inductor"])
    return (row["tensor"], shape, *said, _times(row["ratio"]), f"{row['largest']:.1e}", row["verdict"])


def _error(x: float | str | None) -> str | None:
    return x if isinstance(x, str | None) else f"{x:.1e}"


def _times(x: float | str | None) -> str | None:
    return x if isinstance(x, str | None) else times(Off(x, 0.0, 0, ()), Off(1.0, 0.0, 0, ()))
