"""The command `coda-inductor`: one verb per row of VERBS, each printing facts as text or, with --json, as JSON.

A verb loads what it needs when it runs, so that --help, --version and a mistyped argument answer at once.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from coda_inductor import __version__
from coda_inductor.codegen.target import SM_90A, TARGETS
from coda_inductor.commands.words import TRUST
from coda_inductor.core.errors import CodaError, Unsupported
from coda_inductor.core.settings import Settings, Target
from coda_inductor.core.versions import behind

VERSIONS = ("torch", "quack-kernels", "nvidia-cutlass-dsl", "triton")
"""The distributions whose versions a bug report needs."""

Answer = tuple[dict[str, Any], Callable[[], str]]
"""What a verb found: the facts for --json, and how to say them as text. Status 1 if they hold "problems"."""


def explain(arguments: Namespace) -> Answer:
    """Which Regions the model becomes, what passes are left, and why."""
    chosen, model = settings(arguments), subject(arguments.subject)
    module = behind("coda_inductor.explain")
    facts = module.explain(*model, arguments.mode, chosen)
    return facts, lambda: str(module.render(facts, arguments.all))


def report(arguments: Namespace) -> Answer:
    """One HTML file with all that explain, graph and kernels say of the model."""
    chosen, model = settings(arguments), subject(arguments.subject)
    module = behind("coda_inductor.commands.page")
    facts = module.report(*model, arguments.mode, chosen, arguments.subject, Path(arguments.out))
    return facts, lambda: str(module.render(facts))


def graph(arguments: Namespace) -> Answer:
    """The model's graphs as programs, after the rewriting or before it."""
    chosen, model = settings(arguments), subject(arguments.subject)
    facts = behind("coda_inductor.explain.steps").program(*model, arguments.mode, chosen)
    listing = behind("coda_inductor.explain.listing")
    return facts, lambda: str(listing.render(facts, arguments.before))


def doctor(arguments: Namespace) -> Answer:
    """What this machine has, and whether a kernel can be made and run, or with --check all kinds of them."""
    chosen = checked(Settings.read()[0])
    if arguments.target and not arguments.check:
        raise Unsupported("--target is about --check", hint="coda-inductor doctor --check --target NAME")
    if not arguments.check:
        module = behind("coda_inductor.commands.doctor")
        facts = module.doctor(chosen)
    else:
        module, progress = behind("coda_inductor.commands.check"), behind("coda_inductor.commands.progress")
        with progress.progress("deriving kernels", shown=not arguments.json) as said:
            facts = module.check(chosen, arguments.target or "", said)
    return facts, lambda: str(module.render(facts))


def kernels(arguments: Namespace) -> Answer:
    """A model's kernels, or those of the store."""
    if not arguments.subject and (arguments.region or arguments.compile or arguments.all):
        raise Unsupported("--region, --compile and --all are about a model", hint="name one as MODULE:FUNCTION")
    chosen = checked(Settings.read(options={"target": arguments.target or SM_90A.name})[0])
    module = behind("coda_inductor.commands.kernels")
    if arguments.subject:
        build = "all" if arguments.all else "first" if arguments.compile else ""
        facts = module.kernels(*subject(arguments.subject), arguments.mode, chosen, arguments.region, build)
    else:
        facts = module.stored(chosen, arguments.target)
    return facts, lambda: str(module.render(facts, arguments.source))


def bench(arguments: Namespace) -> Answer:
    """The model's times and memory under both backends."""
    chosen = settings(arguments)
    module, progress = behind("coda_inductor.commands.bench"), behind("coda_inductor.commands.progress")
    module.checked(arguments.seconds, arguments.rounds, arguments.out, arguments.plot)
    with progress.progress("building the model", shown=not arguments.json) as said:
        facts = module.bench(
            *subject(arguments.subject, valued=True), arguments.mode, chosen, arguments.subject,
            torch_mode=arguments.torch_mode, seconds=arguments.seconds, rounds=arguments.rounds, said=said,
        )  # fmt: skip
    facts["command"] = " ".join(["coda-inductor", *sys.argv[1:]])
    if arguments.out:
        module.written(facts, arguments.out)
    if arguments.plot:
        module.plotted(facts, arguments.plot)
    return facts, lambda: str(module.render(facts))


def rules(arguments: Namespace) -> Answer:
    """The laws and the kinds of Regions."""
    module = behind("coda_inductor.commands.rules")
    facts = module.rules(checked(Settings.read()[0]), arguments.prove)
    return facts, lambda: str(module.render(facts))


def cache(arguments: Namespace) -> Answer:
    """What the store holds, or what was done to it."""
    file, act = CACHE[arguments.action]
    module = behind(f"coda_inductor.commands.{file}")
    facts = act(module, checked(Settings.read()[0]), arguments)
    return facts, lambda: str(module.render(facts))


def warmed(module: Any, chosen: Settings, arguments: Namespace) -> dict[str, Any]:
    """Compiles a model, unless this machine cannot: that is said before the model is built."""
    spec = one(arguments)
    module.require(chosen)
    return dict(module.warmup(*subject(spec, valued=True), arguments.mode, chosen))


def one(arguments: Namespace) -> str:
    """What an action of `cache` is about. Raises Unsupported unless it is one."""
    if len(arguments.what) != 1:
        wanted = "MODULE:FUNCTION" if arguments.action == "warmup" else "one FILE"
        raise Unsupported(f"cache {arguments.action} takes {wanted}", hint="coda-inductor cache --help")
    return str(arguments.what[0])


CACHE: dict[str, tuple[str, Callable[[Any, Settings, Namespace], dict[str, Any]]]] = {
    "ls": ("cache", lambda module, chosen, a: module.cache(chosen, "ls", a.what, a.all)),
    "rm": ("cache", lambda module, chosen, a: module.cache(chosen, "rm", a.what, a.all)),
    "trim": ("cache", lambda module, chosen, a: module.trim(chosen)),
    "export": ("caches.archive", lambda module, chosen, a: module.export(chosen, one(a))),
    "import": ("caches.archive", lambda module, chosen, a: module.bring_in(chosen, one(a), a.yes)),
    "warmup": ("caches.warmup", warmed),
    "hints": ("caches.hints", lambda module, chosen, a: module.hints(chosen, a.out)),
}
"""The actions of `cache`: the file of commands/ that does it, and how it is asked."""


def diff(arguments: Namespace) -> Answer:
    """How far a model's tensors are off, by coda and by Inductor."""
    chosen, model = settings(arguments), subject(arguments.subject, valued=True)
    module = behind("coda_inductor.commands.diff")
    asked = arguments.mode, chosen, arguments.against, arguments.bisect, not arguments.json
    facts = module.diff(*model, *asked)
    return facts, lambda: str(module.render(facts))


def a_check(parser: ArgumentParser) -> None:
    """The arguments of `doctor`."""
    what = "compile every kind of kernel, and on a card compare each with the interpreter; paste it into a report"
    parser.add_argument("--check", action="store_true", help=what)
    parser.add_argument("--target", choices=tuple(TARGETS), help="with --check; default: the card's")


def a_kernel(parser: ArgumentParser) -> None:
    """The arguments of `kernels`."""
    what = "returns (model, args) or (model, args, kwargs); without it, the kernels in the cache"
    parser.add_argument("subject", metavar="MODULE:FUNCTION", nargs="?", help=what)
    parser.add_argument("--mode", choices=("infer", "train"), default="infer", help="default: %(default)s")
    parser.add_argument("--target", choices=tuple(TARGETS), help=f"default: {SM_90A.name}; of the cache: all")
    parser.add_argument("--region", metavar="ID", default="", help="only this one: r3, or the start of a digest")
    parser.add_argument("--source", action="store_true", help="print the generated modules")
    parser.add_argument("--compile", action="store_true", help="compile the tile that would run, into the cache")
    parser.add_argument("--all", action="store_true", help="compile every tile that tuning would try")


def a_proof(parser: ArgumentParser) -> None:
    """The arguments of `rules`."""
    parser.add_argument("--prove", action="store_true", help="prove each law with sympy")


def an_entry(parser: ArgumentParser) -> None:
    """The arguments of `cache`."""
    does = "list, remove, or trim to the limit; write or read an archive; compile a model into it; write hints"
    what = "ls, rm: of kernels or Regions, four digits are enough; export, import: a FILE; warmup: MODULE:FUNCTION"
    parser.add_argument("action", metavar=f"{{{','.join(CACHE)}}}", choices=tuple(CACHE), help=does)
    parser.add_argument("what", metavar="DIGEST", nargs="*", default=[], help=what)
    parser.add_argument("--all", action="store_true", help="with rm: everything")
    parser.add_argument("--yes", action="store_true", help="with import: you trust who made the archive")
    parser.add_argument("--mode", choices=("infer", "train"), default="infer", help="of warmup; default: %(default)s")
    parser.add_argument("--out", metavar="FILE", default="hints.json", help="of hints; default: %(default)s")
    parser.epilog = TRUST


def a_model(parser: ArgumentParser) -> None:
    """The arguments of a verb about one model."""
    parser.add_argument("subject", metavar="MODULE:FUNCTION", help="returns (model, args) or (model, args, kwargs)")
    parser.add_argument("--mode", choices=("infer", "train"), default="infer", help="default: %(default)s")
    parser.add_argument("--target", choices=get_args(Target), help=f"default: CODA_INDUCTOR_TARGET, or {SM_90A.name}")


def a_measurement(parser: ArgumentParser) -> None:
    """The arguments of `bench`."""
    parser.add_argument("subject", metavar="MODULE:FUNCTION", help="returns (model, args) or (model, args, kwargs)")
    what = "forward; forward and backward; with AdamW too (default: %(default)s)"
    parser.add_argument("--mode", choices=("infer", "train", "step"), default="infer", help=what)
    parser.add_argument("--target", choices=get_args(Target), help="reference: on torch, slow, to try the command")
    parser.add_argument("--torch-mode", metavar="MODE", help="torch.compile's mode on both sides, as reduce-overhead")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="that each runs alone, a round (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="append the row to a file of JSON lines")
    parser.add_argument("--plot", metavar="FILE", help="draw the times into FILE.svg, .png or .pdf")


def a_depth(parser: ArgumentParser) -> None:
    """The arguments of `explain`."""
    a_model(parser)
    parser.add_argument("--all", action="store_true", help="print each Region, also the equal ones of equal layers")


def a_page(parser: ArgumentParser) -> None:
    """The arguments of `report`."""
    a_model(parser)
    parser.add_argument("--out", metavar="FILE", default="coda_report.html", help="default: %(default)s")


def a_comparison(parser: ArgumentParser) -> None:
    """The arguments of `diff`."""
    parser.add_argument("subject", metavar="MODULE:FUNCTION", help="returns (model, args) or (model, args, kwargs)")
    parser.add_argument("--mode", choices=("infer", "train"), default="infer", help="default: %(default)s")
    parser.add_argument("--target", choices=get_args(Target), help="default: the GPU's; reference on a CPU")
    references = ("float64", "float32", "inductor")
    parser.add_argument("--against", choices=references, default="float64", help="what is right; default: %(default)s")
    parser.add_argument("--bisect", action="store_true", help="find the law, or the Region, that is wrong")


def a_side(parser: ArgumentParser) -> None:
    """The arguments of `graph`."""
    a_model(parser)
    parser.add_argument("--before", action="store_true", help="show what Inductor alone would launch")


@dataclass(frozen=True, slots=True)
class Verb:
    """A row of the command: its help, its arguments besides --json, and what it does."""

    help: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], Answer]


VERBS: dict[str, Verb] = {
    "explain": Verb("what would be fused, what would not, and why", a_depth, explain),
    "report": Verb("one HTML page: graph, Regions, laws, kernels, timings", a_page, report),
    "graph": Verb("the rewritten program of a model", a_side, graph),
    "bench": Verb("your model under both backends: times, memory", a_measurement, bench),
    "diff": Verb("run a model: errors of coda and of Inductor, the worst first", a_comparison, diff),
    "kernels": Verb("the generated kernels: source, tiles, registers", a_kernel, kernels),
    "rules": Verb("the laws, when they are used, and their proofs", a_proof, rules),
    "cache": Verb("the kernels and measurements kept on disk", an_entry, cache),
    "doctor": Verb("what this machine has, and one kernel compiled", a_check, doctor),
}


def settings(arguments: Namespace) -> Settings:
    """The environment's settings; a flag that was given wins."""
    return checked(Settings.read(options={"target": arguments.target} if arguments.target else {})[0])


def checked(chosen: Settings) -> Settings:
    """The settings, if all that they name exists; else raises SettingError."""
    chosen.check_kinds(behind("coda_inductor.passes.switches").NAMES)  # imports torch, which takes seconds
    return chosen


def subject(spec: str, **how: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from the function that "MODULE:FUNCTION" names; `how` it is built, as capture.load says."""
    capture = behind("coda_inductor.explain.capture")
    try:
        model, args, kwargs = capture.load(spec, **how)
    except ImportError as error:
        raise Unsupported(f"cannot import it: {error}", where=spec) from error
    return model, args, kwargs


@contextmanager
def said_once() -> Iterator[None]:
    """Within, torch's fake tensors do not log what they raise: it would be said twice, once with all of its frames."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_no_exception(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log.addFilter(is_no_exception)
    try:
        yield
    finally:
        log.removeFilter(is_no_exception)


def theirs(error: Exception) -> str:
    """The user's "file:line" that an exception came from; empty if it is ours. Dynamo names it in the text only.
    Libraries, and what builds and runs the model (capture.py), are passed over."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    named = re.findall(r'File "([^"]+)", line (\d+)', str(error).partition("from user code:")[2])
    frames = named or [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    ours, passing = os.path.dirname(__file__) + os.sep, (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__))
    for file, line in reversed(frames):
        if file.startswith(ours) and not file.endswith("capture.py"):
            return ""
        if not file.startswith((ours, "<")) and not any(p in file for p in passing):
            return f"{file}:{line}"
    return "{}:{}".format(*named[-1]) if named else ""


def said_by(error: Exception) -> str:
    """Its first line; of an operation that fails while it is traced, what that says."""
    first, _, rest = str(error).strip().partition("\n")
    inside = re.search(r"Explanation: .*? got (\w+\(.*)", rest)
    return inside[1] if inside else first


def versions() -> str:
    """One line with our version and those of what we stand on."""
    found = [f"Python {platform.python_version()}"]
    for name in VERSIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return f"coda-inductor {__version__} ({', '.join(found)})"


def parser() -> ArgumentParser:
    """The command line, made from VERBS."""
    top = ArgumentParser("coda-inductor", description="What the torch.compile backend coda does to a model.")
    top.add_argument("--version", action="store_true", help="print versions and exit")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in VERBS.items():
        sub = verbs.add_parser(name, help=verb.help, description=verb.help)
        verb.arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the facts as JSON")
        sub.add_argument("--traceback", action="store_true", help="show where an exception of yours came from")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if problems were found, or 2 when the request cannot be answered (said in one line
    on stderr)."""
    command = parser()
    arguments = command.parse_args(argv)
    if arguments.version:
        print(versions())
        return 0
    if arguments.verb is None:
        command.print_usage(sys.stderr)
        return 2
    try:
        with said_once(), redirect_stdout(sys.stderr):  # what the model prints is no part of the answer
            facts, text = VERBS[arguments.verb].run(arguments)
    except KeyboardInterrupt:
        print("coda-inductor: interrupted", file=sys.stderr)
        return 130
    except CodaError as error:
        print(f"coda-inductor: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        place = theirs(error)
        if not place or arguments.traceback or Settings.read()[0].strict:
            raise
        said = Unsupported(
            f"{type(error).__name__}: {said_by(error)}", where=place, hint="--traceback shows where it came from"
        )
        print(f"coda-inductor: error: {said}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(facts, indent=2) if arguments.json else text(), flush=True)
    except BrokenPipeError:  # as of `| head`; what is left in the buffer must not be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if facts.get("problems") else 0


if __name__ == "__main__":
    sys.exit(main())
