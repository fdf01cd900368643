"""`coda-inductor doctor`: does this machine have what generated kernels need, and what else may change a graph?

Compiles one kernel for sm_90a, with a GPU or without; on an sm_90 GPU runs it and compares it with the interpreter.
(All kinds of kernels, on any card that has a target: check.py.)
"problems" holds what is broken on a machine that could run kernels; one that could not has none.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config

from coda_inductor import __version__
from coda_inductor.codegen import legality, target
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.cache import entries, existing, possible
from coda_inductor.commands.kernels import compiled
from coda_inductor.commands.words import size, table
from coda_inductor.core import blocks
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.project import at
from coda_inductor.core.region import Let, Operand, Product, Reduction, Region, Store
from coda_inductor.core.settings import Settings, default_cache
from coda_inductor.core.verify import verify
from coda_inductor.core.versions import TESTED, behind, check_torch
from coda_inductor.explain.report import plural
from coda_inductor.kernels import launch, library, proof
from coda_inductor.kernels.prebuild import Job, outcomes
from coda_inductor.measure import tune

Facts = dict[str, Any]

ROWS = 300  # a whole tile of 256 and a part of one
SAMPLE = Region(
    n=264,
    dtype="bf16",
    products=(Product("acc", 0, 1, 256, "nk"),),
    operands=(Operand("x", "tile", "bf16"),),
    lets=(Let("h", "add", ("acc", "x")), Let("q", "mul", ("h", "h"))),
    stores=(Store("h", "bf16"),),
    reductions=(Reduction("q"),),
)
"""A residual and the sum of its squares: loads a tile, stores one, sums over rows."""

PACKAGES = {"triton": "triton", "cutlass-dsl": "nvidia-cutlass-dsl", "quack": "quack-kernels"}

OTHERS = {
    "liger_kernel": "replaces norms, activations and losses of transformers' models by calls that cannot be read",
    "unsloth": "replaces whole layers of transformers' models by calls that cannot be read",
    "apex": "its fused norms are calls that cannot be read",
    "transformer_engine": "its modules are calls that cannot be read",
    "xformers": "its attention and SwiGLU are calls that cannot be read",
    "torchao": "turns weights into tensor subclasses: products of FP8 are read, others are left to Inductor",
}
"""Libraries that change what a graph holds, and how."""

INDUCTOR: dict[str, str] = {
    "cpp_wrapper": "every graph is left to Inductor: its C++ wrapper does not call our kernels",
    "freezing": "weights become constants, which Inductor may fold or lay out anew",
    "force_disable_caches": "every process derives and compiles anew",
    "fx_graph_cache": "every process derives and compiles anew",
    "joint_custom_pre_pass": "runs before ours, on the same graph",
    "emulate_precision_casts": "Inductor rounds as eager does; for Regions, CODA_INDUCTOR_NUMERICS=strict does",
}
"""Settings of Inductor that matter if they differ from its defaults, and why."""


def doctor(settings: Settings) -> Facts:
    """Everything that is found out; nothing is raised for what is missing."""
    capability = target.capability()
    row = untested(capability)
    asked = {"untested": True} if row and settings.target == row.name else {}
    facts: Facts = {
        "schema": 1,
        "versions": versions(),
        "torch": why(usable_torch),
        "driver": driver(),
        "gpus": [gpu(i) for i in range(torch.cuda.device_count())] if capability else [],
        "untested": row.name if row else "",
        "kernels": why(lambda: target.available(capability, **asked)),
        "compiler": why(lambda: target.available(target.SM_90A.capability)),
        "cache": cache(settings),
        "settings": in_force(settings),
        "others": others(),
        "inductor": inductor(),
    }
    facts["sample"] = sample(capability == target.SM_90A.capability) if facts["compiler"]["works"] else None
    card = capability == target.SM_90A.capability or bool(asked)
    facts["problems"] = problems(facts, card)
    return facts


def untested(capability: tuple[int, int] | None) -> target.Target | None:
    """The row of a card like which none has run kernels yet; None of another card."""
    found = [row for row in target.TARGETS.values() if row.capability == capability and not row.tested]
    return found[0] if found else None


def versions() -> dict[str, str | None]:
    """Of what a kernel depends on; None: not installed."""
    theirs = {name: target.installed(package) for name, package in PACKAGES.items()}
    return {"coda-inductor": __version__, "torch": torch.__version__, "cuda": torch.version.cuda, **theirs}


def usable_torch() -> None:
    """Raises Unsupported if this torch was not tested, or lacks a name that compiling needs."""
    check_torch()
    behind("coda_inductor.inductor.compile")


def driver() -> str | None:
    """The version of NVIDIA's kernel driver, None if there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def gpu(i: int) -> Facts:
    """One GPU."""
    found = torch.cuda.get_device_properties(i)
    return {"name": found.name, "arch": target.arch((found.major, found.minor)), "bytes": found.total_memory}


def why(check: Any) -> Facts:
    """Does `check` pass, and if not, what it says."""
    try:
        check()
    except Unsupported as error:
        return {"works": False, "why": error.what, "hint": error.hint}
    return {"works": True, "why": "", "hint": ""}


def cache(settings: Settings) -> Facts:
    """The store: can it be made, is it private and writable, what does it hold? It is not made."""
    path = settings.cache_dir or default_cache()
    found = why(lambda: possible(settings.cache_dir))
    store = existing(settings.cache_dir) if found["works"] else None
    kept = entries(store) if store else []
    kernels = sum(e.kind == "kernel" for e in kept)
    counts = {"kernels": kernels, "records": sum(e.kind in ("tuning", "contest") for e in kept)}
    return {"path": path, "exists": Path(path).exists(), **found, **counts, "bytes": sum(e.bytes for e in kept)}


def in_force(settings: Settings) -> list[Facts]:
    """Every setting: its value and the variable that sets it ("": the default). Options of a torch.compile call win.
    What torch.use_deterministic_algorithms sets is one where it is on."""
    origins = Settings.origins() | {"deterministic": "torch.use_deterministic_algorithms"}
    names = [f.name for f in dataclasses.fields(settings) if f.name != "deterministic" or settings.deterministic]
    values = {name: getattr(settings, name) for name in names}
    said = {name: ",".join(sorted(v)) if isinstance(v, frozenset) else v for name, v in values.items()}
    return [{"name": name, "value": value, "from": origins.get(name, "")} for name, value in said.items()]


def others() -> list[Facts]:
    """Which of OTHERS are here."""
    return [
        {"name": name, "version": _version(name), "imported": name in sys.modules, "effect": effect}
        for name, effect in OTHERS.items()
        if name in sys.modules or find_spec(name) is not None
    ]


def _version(module: str) -> str | None:
    names = metadata.packages_distributions().get(module) or [module]
    return target.installed(names[0])


def inductor() -> list[Facts]:
    """Which of INDUCTOR differ from the defaults."""
    config = inductor_config.get_config_copy()
    unset = {"cpp_wrapper": False, "fx_graph_cache": True, "joint_custom_pre_pass": None}
    return [
        {"name": name, "value": str(config[name]), "effect": effect}
        for name, effect in INDUCTOR.items()
        if name in config and config[name] != unset.get(name, False)
    ]


def sample(run: bool) -> Facts:
    """SAMPLE compiled for sm_90a in a folder of its own, and if it is to `run`, its error against the interpreter."""
    config = legality.candidates(verify(SAMPLE), ROWS)[0]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        (made,) = outcomes([Job(SAMPLE, config)], store).values()
        facts: Facts = {"target": target.SM_90A.name, "tile": str(config), "seconds": made.seconds, "why": made.reason}
        facts |= compiled(library.folder(SAMPLE, config, Path(store)))
        facts["linked"] = library.load(SAMPLE, config, Path(store)) is not None
        facts |= {"ran": False, "error": None, "allowed": proof.TOLERANCE}
        if run and not made.reason:
            try:
                facts |= {"ran": True, "error": error_of(config, store)}
            except (Unsupported, RuntimeError) as error:  # a driver or runtime that refuses the kernel
                facts["why"] = str(error)
    return facts


def error_of(config: Config, store: str) -> float:
    """SAMPLE's largest relative error on the current GPU."""
    p = SAMPLE.products[0]
    shapes = ((ROWS, p.k), (SAMPLE.n, p.k), (ROWS, SAMPLE.n))
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    blocks.poison(SAMPLE, outs := blocks.outputs(SAMPLE, inputs))
    launch.kernel(SAMPLE.text, store).run_in(config, inputs, outs)
    return tune.worst_error(SAMPLE, inputs, outs)


def problems(facts: Facts, card: bool) -> list[str]:
    """What keeps a machine from running kernels that its card could run; of another, what is wrong with the cache."""
    checks = ("torch", "kernels", "cache") if card else ("cache",)
    found = [said(facts[name]) for name in checks if not facts[name]["works"]]
    made = facts["sample"] if card else None
    if made and made["why"]:
        found.append(f"the sample kernel failed: {made['why']}")
    elif made and made["error"] is not None and not made["error"] < made["allowed"]:  # NaN is wrong, too
        found.append(f"the sample kernel is wrong: relative error {made['error']:.1e}, {made['allowed']} is allowed")
    return found


def said(check: Facts) -> str:
    """Why a check failed, in one line."""
    return f"{check['why']}{' (' + check['hint'] + ')' if check['hint'] else ''}"


def render(facts: Facts) -> str:
    """One line for each finding, and the verdict."""
    gpus = [f"{g['name']} ({g['arch']}, {size(g['bytes'])})" for g in facts["gpus"]] or ["none"]
    rows: list[tuple[str, str]] = [
        ("versions", ", ".join(f"{name} {version or 'none'}" for name, version in facts["versions"].items())),
        ("torch", TESTED if facts["torch"]["works"] else f"every graph is left to Inductor: {said(facts['torch'])}"),
        *(("gpu", g) for g in gpus),
        ("driver", facts["driver"] or "none"),
        ("kernels", _kernels(facts)),
        *[("check", CHECK)] * bool(facts["untested"]),
        ("compiler", _compiler(facts)),
        ("cache", _cache(facts["cache"])),
    ]
    settings = [
        (f"  {s['name']}", _value(s["value"]), f"from {s['from']}" if s["from"] else "default")
        for s in facts["settings"]
    ]
    lines = [*table(rows), "settings", *table(settings)]
    for title, found in (
        ("other libraries that change graphs", "others"),
        ("Inductor's settings that matter", "inductor"),
    ):
        lines.append(f"{title}{'' if facts[found] else ': none'}")
        lines += table([(f"  {r['name']}", r.get("version") or r.get("value"), r["effect"]) for r in facts[found]])
    lines += [f"PROBLEM: {problem}" for problem in facts["problems"]] or ["no problems found"]
    lines += [f"report what is wrong{at('Issues')}, with `coda-inductor doctor --json`"] * bool(at("Issues"))
    return "\n".join(lines)


CHECK = (
    "`coda-inductor doctor --check` compares all kinds of kernels with the interpreter: please report what it prints"
)


def _kernels(facts: Facts) -> str:
    """Can they be generated and run?"""
    if not facts["kernels"]["works"]:
        return f"no: {said(facts['kernels'])}"
    if facts["untested"]:
        return f"for {facts['untested']}, {target.UNTESTED}: each is compared with the interpreter before it is used"
    return "can be generated and run"


def _compiler(facts: Facts) -> str:
    """What became of the sample."""
    made = facts["sample"]
    if made is None:
        return f"no: {said(facts['compiler'])}"
    if made["why"]:
        return f"the sample kernel failed: {made['why']}"
    told = f"one kernel for {made['target']} ({made['tile']}) in {made['seconds']:.1f} s"
    told += f", {made['registers']} registers, {plural(made['stack'], 'byte')} of stack"
    if not made["linked"]:
        told += f"; not linked ({', '.join(library.LINKERS)}?), so that every process imports the compiler"
    if not made["ran"]:
        return f"{told}; not run, no {target.arch(target.SM_90A.capability)} GPU"
    return f"{told}; ran, relative error {made['error']:.1e} of {made['allowed']} allowed"


def _cache(found: Facts) -> str:
    if not found["works"]:
        return f"no: {said(found)}"
    if not found["exists"]:
        return f"{found['path']}: not there yet, made at the first compile"
    kept = f"{plural(found['kernels'], 'kernel')}, {plural(found['records'], 'record')}, {size(found['bytes'])}"
    return f"{found['path']}: private, writable; {kept}"


def _value(value: Any) -> str:
    return {True: "1", False: "0", None: "-", "": "-"}.get(value, str(value))
