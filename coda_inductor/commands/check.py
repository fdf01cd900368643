"""`coda-inductor doctor --check`: are a target's kernels right on this card?

Every Region of codegen/cases.py runs in the tile that is tried first, at three ragged sizes of M, its outputs poisoned
with NaN, and each number is compared with the interpreter's (kernels/proof.py). Without such a card they are compiled
only. What it prints is made to be pasted into an issue.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.cases import CASES
from coda_inductor.codegen.target import SM_90A, Target, arch, of_name
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.doctor import driver, gpu, versions
from coda_inductor.commands.kernels import compiled
from coda_inductor.commands.progress import Say
from coda_inductor.commands.words import size, table
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.project import at
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.explain.report import plural
from coda_inductor.kernels import launch, library, proof
from coda_inductor.kernels.prebuild import Job, outcomes

Facts = dict[str, Any]

N, K = 1000, 528  # no tile divides either
ROWS = 8192  # whose tiles are tried
RIGHT, WRONG, COMPILED, FAILED, REFUSED = "right", "WRONG", "compiled, not run", "FAILED", "refused"


class Asked(NamedTuple):
    """One kernel to check: a case in a tile, its second weight first in memory if `swapped`."""

    case: str
    region: Region
    config: Config
    swapped: bool


def check(settings: Settings, name: str, said: Say) -> Facts:
    """What became of every case on the target `name` (empty: the card's, or what the settings say). `said` is told
    what is done. Raises Unsupported if nothing can be compiled for it."""
    found = target.capability()
    row = chosen(settings, name, found)
    target.available(row.capability, untested=True)
    runs = found == row.capability
    asked, rows = list[Asked](), list[Facts]()
    for make in CASES:
        region = make(N, K)
        try:
            legality.check(region, row)
            config = legality.candidates(region, ROWS, row)[0]
            asked += [Asked(make.__name__, region, config, swapped) for swapped in orders(region)]
        except Unsupported as why:
            rows.append({"case": make.__name__, "verdict": REFUSED, "why": why.said})
    rows = [*checked(asked, row, runs, said), *rows]
    bad = [f"{r['case']} in {r['tile']}: {r['why']}" for r in rows if r["verdict"] in (WRONG, FAILED)]
    return {
        "schema": 1, "target": row.name, "caveat": row.caveat, "ran": runs, "versions": versions(), "driver": driver(),
        "gpu": gpu(torch.cuda.current_device()) if found else None, "sizes": list(proof.SIZES), "n": N, "k": K,
        "cases": rows, "problems": bad,
    }  # fmt: skip


def chosen(settings: Settings, name: str, found: tuple[int, int] | None) -> Target:
    """The target that is asked for; else the card's; else that of which everything speaks that asks no machine."""
    if named := name or (settings.target if settings.target not in ("auto", "reference") else ""):
        return of_name(named)
    return target.of_capability(found, untested=True) if found else SM_90A


def orders(region: Region) -> tuple[bool, ...]:
    """The orders in which weights may lie that a kernel is made for."""
    return (False, True) if len(region.products) == 2 and not region.half else (False,)


def checked(asked: list[Asked], row: Target, runs: bool, said: Say) -> Iterator[Facts]:
    """Compiles all in a store of its own, and runs them."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        said(f"compiling {len(asked)} kernels for {row.name}")
        jobs = [Job(a.region, a.config, a.swapped, row.name) for a in asked]
        made = outcomes(jobs, store)
        for i, (a, job) in enumerate(zip(asked, jobs, strict=True), 1):
            said(f"{i} of {len(asked)}: {a.case} in {a.config}")
            place = library.folder(a.region, a.config, Path(store), swapped=a.swapped, target=row)
            facts: Facts = {"case": a.case, "tile": str(a.config), "swapped": a.swapped, **compiled(place)}
            facts |= {"allowed": proof.allowed(a.region), "errors": [], "why": made[job].reason}
            if made[job].reason:
                facts["verdict"] = FAILED
            elif runs:
                facts |= ran(a, store)
            else:
                facts["verdict"] = COMPILED
            yield facts


def ran(asked: Asked, store: str) -> Facts:
    """How far a kernel is off at each size, and the verdict."""
    errors, why = list[proof.Error](), ""
    allowed = proof.allowed(asked.region)
    try:
        kernel = launch.kernel(asked.region.text, store).compiled(asked.config, swapped=asked.swapped)
        for error in proof.measured(asked.region, asked.config, kernel, swapped=asked.swapped):
            errors.append(error)
    except Unsupported as refusal:
        why = refusal.said
    wrong = [error for error in errors if not error.within(allowed)]
    if wrong:
        why = f"{wrong[0]}, {allowed} is allowed"
    return {
        "errors": [e._asdict() for e in errors],
        "why": why,
        "verdict": WRONG if wrong else FAILED if why else RIGHT,
    }


def render(facts: Facts) -> str:
    """The machine, a line for each kernel, and the sum."""
    caveat = f" ({facts['caveat']})" if facts["caveat"] else ""
    g = facts["gpu"]
    lines = [f"coda-inductor doctor --check, for {facts['target']}{caveat}"]
    lines += table([
        ("versions", ", ".join(f"{name} {version or 'none'}" for name, version in facts["versions"].items())),
        ("gpu", f"{g['name']} ({g['arch']}, {size(g['bytes'])})" if g else "none"),
        ("driver", facts["driver"] or "none"),
    ])  # fmt: skip
    if not facts["ran"]:
        lines.append(f"compiled only: a card of {arch(of_name(facts['target']).capability)} is needed to run them")
    made = [r for r in facts["cases"] if r["verdict"] != REFUSED]
    heads = ("M = 1", "M = 37", "many", "allowed") if facts["ran"] else ()
    what = "Relative errors at three numbers of rows M, and what is allowed; stack: bytes a thread, spilled registers."
    lines += ["", what if facts["ran"] else "Stack: bytes a thread, spilled registers."]
    lines += table([("case", "tile", "registers", "stack", *heads, ""), *(_row(r, facts["ran"]) for r in made)])
    refused = [r for r in facts["cases"] if r["verdict"] == REFUSED]
    lines += [f"{r['case']}: refused: {r['why']}" for r in refused]
    lines += [f"PROBLEM: {problem}" for problem in facts["problems"]]
    verdicts = [r["verdict"] for r in made]
    counts = [f"{verdicts.count(v)} {v}" for v in (RIGHT, COMPILED, WRONG, FAILED) if v in verdicts]
    counts += [f"{plural(len(refused), 'case')} refused"] if refused else []
    lines += ["", f"{plural(len(made), 'kernel')}: {', '.join(counts)}"]
    if facts["caveat"] and facts["ran"]:
        lines.append(f"no card like this was at hand: please report all of this{at('Issues')}, also if all is right")
    return "\n".join(lines)


def _row(r: Facts, ran: bool) -> tuple[object, ...]:
    """A kernel's line: with its relative errors, if kernels ran."""
    case = f"{r['case']}, second weight first" if r["swapped"] else r["case"]
    errors = [f"{e['relative']:.1e}" for e in r["errors"]]
    told = [*errors, *["-"] * (len(proof.SIZES) - len(errors)), r["allowed"]] if ran else []
    return case, r["tile"], r["registers"], r["stack"], *told, r["verdict"]
