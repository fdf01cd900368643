"""`coda-inductor rules`: the laws (rewrite/laws.py) and the kinds of Regions, and a proof of each law on request.

A proof evaluates both sides on arrays of symbols and lets sympy find their difference to be 0; for the shapes that the
law refuses it must find that it is not, so a law that proves too much is noticed as well.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import time
from typing import Any, get_args

import numpy as np
import sympy

from coda_inductor.commands.words import table
from coda_inductor.core.settings import Numerics, Settings
from coda_inductor.passes.switches import KINDS, NAMES, PASSES, REGION_KINDS, allowed, laws_of
from coda_inductor.rewrite import laws
from coda_inductor.rewrite.laws import LAWS, Law

Facts = dict[str, Any]

NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
SIZES = tuple({"M": 2, "K": k, "N": 2} for k in (1, 2, 3))
"""The extents of a proof: all laws are sums over K, in which 1 may be special."""


def rules(settings: Settings, prove: bool) -> Facts:
    """Every law and every kind of Region: what it is, and whether it is used under `settings`."""
    return {
        "schema": 1,
        "numerics": settings.numerics,
        "laws": [law_facts(law, settings, prove) for law in LAWS],
        "kinds": [
            {"name": name, "what": what, "used": allowed(name, REGION_KINDS, settings)} for name, what in KINDS.items()
        ],
        **{name: allowed(name, NAMES, settings) for name in PASSES},
    }


def law_facts(law: Law, settings: Settings, prove: bool) -> Facts:
    """One law. "used": under the settings in force; "default": under each CODA_INDUCTOR_NUMERICS, all else unset."""
    before, after = SPELLED[law.name]
    default = {n: law.name in laws_of(Settings(numerics=n)) for n in NUMERICS}
    facts = {
        "name": law.name,
        "before": before,
        "after": after,
        "shapes": law.shapes,
        "refuses": list(law.refuses),
        "when": law.when,
        "numerics": law.numerics,
        "source": law.source,
        "default": default,
        "used": law.name in laws_of(settings),
    }
    return facts | ({"proof": proof(law)} if prove else {})


def _spelled() -> dict[str, tuple[str, str]]:
    """The two sides of each law, by its name, as they are written in its source."""
    found, source = {}, inspect.getsource(laws)
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == Law.__name__:
            words = {k.arg: k.value for k in call.keywords}
            sides = [words[side] for side in ("before", "after")]
            bodies = [s.body if isinstance(s, ast.Lambda) else s for s in sides]
            first, second = (ast.get_source_segment(source, body) or "" for body in bodies)
            found[ast.literal_eval(words["name"])] = first, second
    return found


SPELLED = _spelled()


def proof(law: Law) -> Facts:
    """The verdict, and the milliseconds that it took."""
    start = time.perf_counter()
    wrong = next((s for s in SIZES if not holds(law, law.shapes, s)), None)
    loose = next((r for r in law.refuses if all(holds(law, r, s) for s in SIZES)), None)
    if wrong:
        verdict = f"false for {wrong}"
    elif loose:
        verdict = f"true also for the refused {loose}"
    else:
        verdict = "proved"
    sizes = [dict(s) for s in SIZES]
    return {"verdict": verdict, "ms": (time.perf_counter() - start) * 1e3, "sizes": sizes}


def holds(law: Law, shapes: dict[str, str], sizes: dict[str, int]) -> bool:
    """Are both sides defined and equal for every positive value of arrays of these shapes?"""
    arrays = [symbols(name, shape, sizes) for name, shape in shapes.items()]
    try:
        before, after = np.broadcast_arrays(law.before(*arrays), law.after(*arrays))
    except ValueError:  # shapes that do not fit
        return False
    return all(sympy.simplify(sympy.nsimplify(x - y)) == 0 for x, y in zip(before.flat, after.flat, strict=True))


def symbols(name: str, shape: str, sizes: dict[str, int]) -> Any:
    """An array of distinct symbols, of the extents that `shape` names ("M 1")."""
    extents = [1 if word == "1" else sizes[word] for word in shape.split()]
    made = np.empty(extents, dtype=object)
    for index in itertools.product(*map(range, extents)):
        made[index] = sympy.Symbol(f"{name}_{''.join(map(str, index))}", positive=True)
    return made


def render(facts: Facts) -> str:
    """Each law in a few lines, then the kinds, and the passes."""
    lines = []
    for law in facts["laws"]:
        on = ", ".join(f"{n} {'on' if law['default'][n] else 'off'}" for n in NUMERICS)
        rows = [
            ("shapes", ", ".join(f"{name} [{shape.replace(' ', ', ')}]" for name, shape in law["shapes"].items())),
            ("when", law["when"]),
            ("numerics", law["numerics"]),
            ("default", on),
            ("source", law["source"]),
        ]
        if found := law.get("proof"):
            extents = "; ".join(", ".join(f"{k}={v}" for k, v in s.items()) for s in found["sizes"])
            rows.append(("proof", f"{found['verdict']} in {found['ms']:.0f} ms, on symbols for {extents}"))
        lines += [f"{law['name']}{'' if law['used'] else '   (switched off)'}"]
        lines += [f"    {law['before']}", f"  = {law['after']}", *table(rows, "    "), ""]
    kinds = [(k["name"], k["what"] + ("" if k["used"] else "   (switched off)")) for k in facts["kinds"]]
    kinds += [(name, what + ("" if facts[name] else "   (switched off)")) for name, what in PASSES.items()]
    names = "all of these are names for CODA_INDUCTOR_DISABLE and CODA_INDUCTOR_ONLY"
    return "\n".join([*lines, f"kinds of Regions, and passes ({names})", *table(kinds, "    ")])
