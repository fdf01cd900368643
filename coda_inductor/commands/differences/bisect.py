"""What makes a tensor wrong: the fewest laws, kinds, passes and Regions without which it is right.

Each try is a compile in which `disable` names some of them, a Region by its digest. A wrong kernel and a wrong law look
alike from there, as without a law the Region is another. So the Region that is found is also run by itself, on random
inputs, beside the interpreter: if the two differ, its kernel is wrong, else what was derived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_inductor.commands.differences.off import off
from coda_inductor.commands.differences.runs import Run
from coda_inductor.commands.progress import Say
from coda_inductor.core import blocks
from coda_inductor.core.blocks import into
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import CodaError
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import show
from coda_inductor.explain.report import place, plural
from coda_inductor.inductor.records import Site
from coda_inductor.kernels import launch, proof
from coda_inductor.ops.custom import REGION
from coda_inductor.passes.plain import PLAIN
from coda_inductor.passes.switches import LAW_NAMES, PASSES, kind

Facts = dict[str, Any]
Tried = Callable[[frozenset[str]], tuple[bool, Run]]
"""Compiles without these names: is the tensor right then? And the run."""
M = (1 << 14, 512)  # rows of the random inputs, at most: of a kernel, whose tile depends on them; of the interpreter
SEED = 0


class Tries:
    """Compiles, each once, counted, and the sites of Regions by digest that any of them had."""

    def __init__(self, tried: Tried, ours: Run, say: Say) -> None:
        self.tried, self.say = tried, say
        self.known: dict[frozenset[str], bool] = {frozenset(): False}
        self.failed, self.last = list[str](), list[str]()
        self.sites: dict[str, list[tuple[int, Site]]] = {}
        self.note(ours)

    def note(self, run: Run) -> list[str]:
        """The digests of a run's Regions."""
        here = dict[str, list[tuple[int, Site]]]()
        for i, report in enumerate(run.reports):
            for site in report.sites:
                here.setdefault(site.region.digest, []).append((i, site))
        self.sites = {**here, **self.sites}
        return list(here)

    def mends(self, names: frozenset[str]) -> bool:
        """Is the tensor right without these? A compile that fails mends nothing."""
        if names not in self.known:
            self.say(f"bisecting, compile {len(self.known)}, without {', '.join(sorted(names)) or 'nothing'}"[:100])
            self.last = []
            try:
                self.known[names], run = self.tried(names)
                self.last = self.note(run)
            except Exception as error:
                self.known[names] = False
                self.failed.append(f"{', '.join(sorted(names))}: {str(error).strip().partition(chr(10))[0]}")
        return self.known[names]

    def fewest(self, names: Sequence[str], *, only_one: bool = False) -> list[str]:
        """A subset of names without which the tensor is right, of which none can be spared; the earlier ones rather.
        Empty if it is wrong without all of them; `only_one`: also, sooner, if there are several.
        (Zeller's delta debugging, over subsets that are left out.)"""
        if not names or not self.mends(frozenset(names)):
            return []
        left, parts = list(names), 2
        while len(left) > 1:
            size = -(-len(left) // parts)
            chunks = [left[i : i + size] for i in range(0, len(left), size)]
            rests = [[x for x in left if x not in chunk] for chunk in chunks] if parts > 2 else []
            if found := next((some for some in (*chunks, *rests) if self.mends(frozenset(some))), None):
                left, parts = found, max(2, parts - 1) if found in rests else 2
            elif only_one:
                return []
            elif parts >= len(left):
                break
            else:
                parts = min(len(left), 2 * parts)
        return left

    def regions(self, ours: Run) -> list[str]:
        """As `fewest`, of Regions. Without some, others are derived, which go as well if they are wrong, too."""
        digests = self.note(ours)
        while digests and not self.mends(frozenset(digests)):
            more = [digest for digest in self.last if digest not in digests]
            if not more:
                return []
            digests += more
        return self.fewest(digests)


def bisect(tried: Tried, ours: Run, settings: Settings, device: torch.device, say: Say) -> Facts:
    """The smallest sets that mend, of laws, of kinds and of passes, and of Regions, with what is known of each. After a
    set of one the further ones are not looked for; "switches" is the smallest. If laws mend, and no single Region, the
    Regions are those that the laws made, and "mends" of each is false."""
    tries = Tries(tried, ours, say)
    sites = {site.region.digest: site for report in ours.reports for site in report.sites}
    say("running each Region by itself")
    differing = [digest for digest, site in sites.items() if alone(site, settings, device)["differs"]]
    laws = sorted({law for site in sites.values() for law in site.laws} & LAW_NAMES)
    kinds = sorted({kind_of(site.region) for site in sites.values()})
    found = dict[str, list[str]]()
    for family, names in {"laws": laws, "kinds": kinds, "passes": sorted(PASSES)}.items():
        if not any(len(mending) == 1 for mending in found.values()):
            found[family] = tries.fewest(sorted({*names} - settings.disable))
    mending, by_law = tries.fewest(differing), list[str]()
    if not mending and found["laws"]:
        by_law = [digest for digest, site in sites.items() if {*site.laws} & {*found["laws"]}]
        mending = tries.fewest(by_law, only_one=True) or tries.fewest(list(sites), only_one=True)
    elif not mending:
        mending = tries.regions(ours)
    regions = [facts_of(digest, tries, settings, device) | {"mends": bool(mending)} for digest in mending or by_law]
    switches = min(filter(None, found.values()), key=len, default=[])
    compiles = len(tries.known) - 1  # without nothing it was compiled before
    facts: Facts = {**found, "switches": switches, "regions": regions, "compiles": compiles, "failed": tries.failed}
    return facts | {"said": conclusion(facts)}


def facts_of(digest: str, tries: Tries, settings: Settings, device: torch.device) -> Facts:
    """A Region: where it stands, what it computes, and whether what runs is what the interpreter says."""
    places = tries.sites[digest]
    graph, site = places[0]
    return {
        "id": site.name,
        "graph": graph,
        "digest": digest,
        "kind": kind_of(site.region),
        "laws": sorted({law for _, s in places for law in s.laws}),
        "source": site.source,
        "places": [{"graph": i, "id": s.name, "source": s.source} for i, s in places],
        "formulas": show(site.region, site.m).splitlines(),
        **alone(site, settings, device),
    }


def kind_of(region: Region) -> str:
    """As `disable` names it."""
    return PLAIN if region.is_plain else kind(region)


def alone(site: Site, settings: Settings, device: torch.device) -> Facts:
    """The Region by itself, on random inputs, as a compiled graph runs it, beside the interpreter: the largest relative
    error of an output, and whether that is more than is allowed (to a kernel what tuning allows). "error" None: it
    cannot run."""
    region = site.region
    allowed = proof.allowed(region)
    allowed = 0.0 if settings.target == "reference" else allowed  # where the interpreter runs
    most = M[settings.target == "reference"]
    try:
        given = inputs(region, min(int(site.m), most) if site.m.isdigit() else most, device)
        if settings.target == "reference":
            outs, wanted = REGION(given, region.text, settings.target), interpret(region, given)
        else:
            outs, wanted = (blocks.outputs(region, given) for _ in range(2))
            blocks.poison(region, outs)
            kernel = launch.kernel(region.text, settings.cache_dir, strict=True, measured=not settings.deterministic)
            kernel(given, outs)
            into(region, given, wanted)
    except (CodaError, torch.OutOfMemoryError) as why:
        return {"error": None, "differs": None, "why": str(why).partition("\n")[0]}
    found = [off(*pair, device) for pair in zip(outs, wanted, strict=True)]
    error = max(math.inf if x.lost or not x.error < math.inf else x.error for x in found)
    return {"error": error if error < float("inf") else str(error), "differs": not error <= allowed, "allowed": allowed}


def inputs(region: Region, m: int, device: torch.device) -> list[Tensor]:
    """Random matrices and operands for M = `m`, up to a multiple of 8 and to whole samples: about 1 in size, products
    of them too; what varies over rows alone is positive, as a sum of squares is."""
    generator, m = torch.Generator(device).manual_seed(SEED), region.rows(-(-m // 8) * 8)
    left, right = (DTYPES[dtype] for dtype in region.dtypes)
    wide = region.compute

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=wide)

    made = dict[int, Tensor]()
    for p in region.products:
        for a, b, k in p.terms:
            if a not in made:
                made[a] = normal(*((m, k) if p.a_layout == "mk" else (k, m))).to(left)
            if b not in made:
                weight = normal(region.width, k) if p.b_layout == "nk" else normal(k, region.n)
                made[b] = (weight / k**0.5).to(right)
    operands = [(normal(*region.shape(o, m)), o) for o in region.operands]
    values = [(x.abs() + 0.5 if o.extent == "token" else x).to(DTYPES[o.dtype]) for x, o in operands]
    return [made[i] for i in range(region.matrices)] + values


def conclusion(facts: Facts) -> str:
    """What follows, and what helps meanwhile."""
    mending = [r for r in facts["regions"] if r["mends"]]
    names = " and ".join(f"{r['id']} ({r['digest']})" for r in mending)
    wrong = [r for r in mending if r["differs"]]
    if wrong:
        which = " and ".join(f"{r['id']} ({r['digest']})" for r in wrong)
        said, leave = f"the kernel of {which} is wrong: it differs from the interpreter", [r["digest"] for r in wrong]
    elif facts["laws"]:
        said, leave = f"what the law {' and '.join(facts['laws'])} made is wrong", facts["laws"]
    elif mending:
        said, leave = f"what was derived as {names} is wrong: it computes what it says", [r["digest"] for r in mending]
    elif facts["switches"]:
        said, leave = f"no Region mends it, but {' and '.join(facts['switches'])} left out", facts["switches"]
    else:
        return "no law, kind, pass or Region mends it: it is wrong without all of them, too"
    return f"{said}\nuntil it is mended, CODA_INDUCTOR_DISABLE={','.join(leave)} does without"


def say_culprit(facts: Facts) -> list[str]:
    """The lines of text about what was found."""
    if not facts["tensor"]:
        return [f"bisection: {facts['said']}"]
    lines = [f"bisection of {facts['tensor']}, {plural(facts['compiles'], 'compile')}"]
    for family in (name for name in ("laws", "kinds", "passes") if name in facts):
        names = ", ".join(facts[family])
        lines.append(f"  right without the {family} {names}" if names else f"  no {family} mend it")
    for r in facts["regions"]:
        others = f" and {plural(len(r['places']) - 1, 'equal one')}" if len(r["places"]) > 1 else ""
        laws = f"  by {', '.join(r['laws'])}" if r["laws"] else ""
        which = f"{r['id']}{others} of graph {r['graph']}  {r['digest']}"
        lines.append(f"  {'right without' if r['mends'] else 'the law made'} {which}  {place(r['source'])}{laws}")
        lines += [f"      {line}" for line in r["formulas"]]
        if r["error"] is None:
            lines.append(f"      its kernel was not run by itself: {r['why']}")
        else:
            error = r["error"] if isinstance(r["error"], str) else f"{r['error']:.1e}"
            word = "differs" if r["differs"] else "does not differ"
            lines.append(f"      on random inputs it {word} from the interpreter: {error}, {r['allowed']} is allowed")
    lines += [f"  failed without {text}" for text in facts["failed"]]
    return [*lines, facts["said"]]
