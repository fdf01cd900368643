"""`coda-inductor report`: what explain, graph and kernels say of a model, and what was measured, as one HTML file.

The file needs no server and loads nothing. page.html.jinja is its form, page.css and page.js go into it; jinja2, which
torch needs as well, escapes all that comes from the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coda_inductor import __version__
from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A, TARGETS
from coda_inductor.commands import page_view
from coda_inductor.commands.cache import entries, existing
from coda_inductor.commands.kernels import generated
from coda_inductor.commands.rules import SPELLED
from coda_inductor.commands.words import size
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain import report as said
from coda_inductor.explain.modules import pattern
from coda_inductor.explain.offline import target_of
from coda_inductor.explain.study import Study, study
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.rewrite.laws import LAWS

Facts = dict[str, Any]
HERE = Path(__file__).parent


def report(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    settings: Settings,
    subject: str,
    out: Path,
) -> Facts:
    """Writes the page of a model to `out`; the totals, and where it lies. Raises Unsupported if that cannot be
    written."""
    found = study(model, args, kwargs, mode, settings)
    text = html(found, settings, subject, mode)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unsupported(f"cannot write {out}: {error.strerror}", hint="name another file with --out") from error
    explained = found.explained
    facts = {name: explained[name] for name in ("schema", "target", "totals", "estimates")}
    return facts | {"file": str(out), "bytes": len(text.encode())}


def render(facts: Facts) -> str:
    """Where the page lies, and the first thing that it says."""
    t = facts["totals"]
    moved = said.changed(t["bytes_before"], t["bytes_after"])
    return (
        f"{facts['file']} ({size(facts['bytes'])}): {said.plural(t['regions'], 'Region')}, memory-bound bytes {moved}"
    )


def html(found: Study, settings: Settings, subject: str, mode: str) -> str:
    """The page's text."""
    form = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    explained = found.explained
    pairs = zip(explained["graphs"], found.programs, strict=True)
    graphs = [page_view.graph_view(i, *pair) for i, pair in enumerate(pairs)]
    made = kernels(found, settings)
    fired = {name for graph in explained["graphs"] for r in graph["regions"] for name in r["laws"]}
    fired |= {law["law"] for program in found.programs for law in program["laws"]}
    return form.get_template("page.html.jinja").render(
        subject=subject,
        mode={"infer": "inference", "train": "training"}[mode],
        target=said.spoken(explained["target"]),
        versions=f"coda-inductor {__version__}, torch {torch.__version__}",
        totals=explained["totals"],
        estimates=explained["estimates"],
        estimated={card: ms.replace("->", "→") for card, ms in said.estimated(explained).items()},
        percent=said.percent,
        graphs=graphs,
        kernels=made,
        laws=[(law, *SPELLED[law.name]) for law in LAWS if law.name in fired],
        timings=timings({k["digest"] for k in made}, made, settings),
        amounts=lambda *counts: said.amounts(*counts).replace("->", "→"),
        changed=lambda *counts: said.changed(*counts).replace("->", "→"),
        outputs=said.outputs,
        place=said.place,
        plural=said.plural,
        snippet=page_view.snippet,
    )


def kernels(found: Study, settings: Settings) -> list[Facts]:
    """The generated module of each distinct Region, or `why` there is none; of its Regions the anchors as `used`, and
    the `modules`, with stars for layers."""
    made: dict[str, Facts] = {}
    target = TARGETS.get(target_of(settings), SM_90A)
    for i, (sites, graph) in enumerate(zip(found.sites, found.explained["graphs"], strict=True)):
        for (site, rows), facts in zip(sites, graph["regions"], strict=True):
            region = site.region
            if region.digest not in made:
                entry: Facts = {"digest": region.digest, "why": "", "text": "", "tiles": [], "records": []}
                entry |= {"used": [], "modules": []}
                try:
                    legality.check(region, target)
                    entry |= generated(site.name, site, rows, target, settings, {})
                except Unsupported as why:
                    entry["why"] = str(why)
                made[region.digest] = entry
            made[region.digest]["used"].append((site.name, f"g{i}-{site.name}"))
            made[region.digest]["modules"].append(pattern(facts["module"]))
    return [*made.values()]


def timings(digests: Iterable[str], made: Sequence[Facts], settings: Settings) -> list[Facts]:
    """What was measured of these Regions: each kernel alone, and groups of Regions against what they replace, as the
    store keeps them and as this process measured them. Milliseconds."""
    found = [
        {"regions": [k["digest"]], "what": f"the kernel alone, up to {r['bucket']} rows", "ms": r["ms"],
         "baseline_ms": None, "device": r["device"] or ""}
        for k in made for r in k["records"]
    ]  # fmt: skip
    store, known = existing(settings.cache_dir), {*digests}
    kept = [(e.facts, e.facts["device"] or "") for e in (entries(store) if store else ()) if e.kind == "contest"]
    here = [(t, "this process") for r in REPORTS for t in r.timings]
    for facts, device in (*kept, *here):
        regions = [str(r) for r in facts["regions"]]
        if known.issuperset(regions):
            what = "against the program without its law" if facts.get("against") else "against Inductor"
            what += ", whose time a hint said" * (facts.get("wins") is not None)
            row = {"regions": regions, "what": what, "ms": facts["ms"], "baseline_ms": facts["baseline_ms"]}
            if not any(row.items() <= other.items() for other in found):
                found.append({**row, "device": device})
    return found
