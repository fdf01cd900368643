"""What the user may choose: one frozen record, read from the environment and from torch.compile's options.

The only place that reads the environment. The environment sets, options override, an unknown name in either is an error
that suggests the nearest known one. Options named `inductor.X` are not ours: they come back as X for Inductor.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from coda_inductor.core.errors import CodaError, warn

Numerics = Literal["strict", "default", "fast"]
Tune = Literal["off", "quick"]
Target = Literal["auto", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "reference"]
"""The rows of codegen/target.py, which a test compares, and two more."""

PREFIX = "CODA_INDUCTOR"
DIGEST = re.compile(r"[0-9a-f]{16}")
"""Of a Region (core/region.py)."""
PASSED_ON = "inductor."
ELSEWHERE = ("cache_dir", "cache_limit", "debug_dir")
"""Settings that change no result."""


class SettingError(CodaError, ValueError):
    """The user named a setting that does not exist, or gave it a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`read` makes it from the environment and the options; the defaults are those of an empty environment."""

    enabled: bool = True
    """False: the graph goes to Inductor untouched."""
    disable: frozenset[str] = frozenset()
    """Laws, region kinds, "casts", "layouts" and "tables" that are not used; and Regions, by their digests."""
    only: frozenset[str] = frozenset()
    """If not empty: the only laws, region kinds, "casts", "layouts" and "tables" that are used."""
    numerics: Numerics = "default"
    """strict: rounds where the original does. default: fewer or moved roundings. fast: as default, and 8-bit products
    add up in the tensor cores' own accumulators."""
    tune: Tune = "quick"
    """How much is measured before a Region is kept: nothing (the cost model decides), or each once."""
    target: Target = "auto"
    """The machine that kernels are made for; "reference" runs every Region on torch instead."""
    chunk: int = 2048
    """Of how many rows of a head's scores the loss and its gradients are made at a time, where that spares memory."""
    cache_dir: str | None = None
    """Where kernels and measurements are kept; None: in `default_cache`."""
    cache_limit: int = 10
    """How many GB (10^9 bytes) that folder may hold before what was used least recently goes; 0: any."""
    hints: bool = True
    """Tuning starts from the tunings that are shipped for this card, and checks each."""
    debug_dir: str | None = None
    """Where graphs, Regions and sources are written for people to read; None: nowhere."""
    strict: bool = False
    """True: a failure of ours is raised instead of falling back to Inductor with a warning."""
    deterministic: bool = False
    """True under torch.use_deterministic_algorithms: what may differ from run to run decides nothing."""

    @property
    def measures(self) -> bool:
        """Is what is kept, and in which kernel it runs, decided by timings?"""
        return self.tune != "off" and not self.deterministic

    @property
    def hinted(self) -> bool:
        """Does tuning start from hints?"""
        return self.measures and self.hints

    @classmethod
    def read(
        cls, environ: Mapping[str, str] = os.environ, options: Mapping[str, Any] | None = None
    ) -> tuple[Settings, dict[str, Any]]:
        """The settings, and the options meant for Inductor without their prefix. Raises SettingError."""
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if variable == PREFIX or variable.startswith(f"{PREFIX}_"):
                name = VARIABLES.get(variable) or unknown(
                    "environment variable", variable, VARIABLES, meant=named_after(variable)
                )
                if text:  # an empty variable is an unset one
                    values[name] = _value(variable, name, text)
            elif variable.startswith("CODA_") and difflib.get_close_matches(variable, VARIABLES, 1, 0.85):
                unknown("environment variable", variable, VARIABLES)
        inductor: dict[str, Any] = {}
        for option, value in (options or {}).items():
            if option.startswith(PASSED_ON):
                inductor[option.removeprefix(PASSED_ON)] = value
            else:
                name = option if option in KINDS else unknown("option", option, KINDS, f"{PASSED_ON}{option}")
                values[name] = _value(f"option {option!r}", name, value)
        torch: Any = sys.modules.get("torch")  # importing it would take the command line seconds
        if torch is not None and torch.are_deterministic_algorithms_enabled():
            values["deterministic"] = True
        return cls(**values), inductor

    @classmethod
    def origins(cls, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Field to the environment variable that sets it; the other fields have their defaults."""
        return {name: variable for variable, name in VARIABLES.items() if environ.get(variable)}

    def key(self) -> tuple[tuple[str, str], ...]:
        """What a cached result depends on: everything except the folders and how much one may hold, in the same order
        in every process."""
        names = (f.name for f in dataclasses.fields(self) if f.name not in ELSEWHERE)
        values = ((name, self.hinted if name == "hints" else getattr(self, name)) for name in names)
        return tuple((name, ",".join(sorted(v)) if isinstance(v, frozenset) else str(v)) for name, v in values)

    def check_kinds(self, known: Collection[str]) -> None:
        """Raises SettingError if `disable` or `only` names what is not among `known`, nor `disable` by its digest a
        Region; warns of RETIRED_KINDS."""
        for kind in sorted(self.disable | self.only):
            if kind in self.disable - self.only and DIGEST.fullmatch(kind):
                continue
            if kind in RETIRED_KINDS:
                warn(f"disable and only: there are no {kind} any more")
            elif kind not in known:
                option = "disable" if kind in self.disable else "only"
                unknown("law, region kind or pass", kind, known, where=f"option {option!r}")


def default_cache(environ: Mapping[str, str] = os.environ) -> str:
    """The folder for kernels and measurements when `cache_dir` names none."""
    caches = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "coda_inductor")


def _boolean(value: object) -> bool:
    """True and False, or how an environment spells them."""
    if isinstance(value, bool):
        return value
    return {"0": False, "1": True}[str(value)]


def _positive(value: object) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool | float) or (number := int(str(value))) < 1:
        raise ValueError(value)
    return number


def _whole(value: object) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, bool | float) or (number := int(str(value))) < 0:
        raise ValueError(value)
    return number


def _names(value: object) -> frozenset[str]:
    """A comma-separated text, or a collection of texts."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ValueError(value)
    return frozenset(name.strip() for name in names if name.strip())


def _folder(value: object) -> str | None:
    """A path, "~" allowed; an empty one is none."""
    if not (value is None or isinstance(value, str | os.PathLike)):
        raise ValueError(value)
    return os.path.abspath(os.path.expanduser(value)) if value else None


def _one_of(choices: Iterable[str]) -> Callable[[object], str]:
    allowed = {choice: choice for choice in choices}
    return lambda value: allowed[str(value)]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is read, and the words that say what it allows. `read` raises KeyError or ValueError."""

    read: Callable[[object], Any]
    allowed: str


def _choice(literal: Any) -> Kind:
    return Kind(_one_of(get_args(literal)), ", ".join(get_args(literal)))


BOOLEAN = Kind(_boolean, "0 or 1")
NAMES = Kind(_names, "names separated by commas")
FOLDER = Kind(_folder, "a path")
POSITIVE = Kind(_positive, "a whole number, 1 or more")
WHOLE = Kind(_whole, "a whole number, 0 or more")

KINDS: dict[str, Kind] = {
    "enabled": BOOLEAN,
    "disable": NAMES,
    "only": NAMES,
    "numerics": _choice(Numerics),
    "tune": _choice(Tune),
    "target": _choice(Target),
    "chunk": POSITIVE,
    "cache_dir": FOLDER,
    "cache_limit": WHOLE,
    "hints": BOOLEAN,
    "debug_dir": FOLDER,
    "strict": BOOLEAN,
}
"""One row per field of Settings that is the user's."""

VARIABLES = {PREFIX if name == "enabled" else f"{PREFIX}_{name.upper()}": name for name in KINDS}
"""Environment variable to field."""


RETIRED = {("tune", "full"): "quick"}
"""Values that meant the same as another."""
RETIRED_KINDS = frozenset({"sweeps"})
"""What `disable` and `only` may still name: a pass that there was."""


def _value(where: str, name: str, value: object) -> Any:
    if isinstance(value, str) and (name, value) in RETIRED:
        kept = RETIRED[name, value]
        warn(f"{where}: {value!r} is no value any more, and was {kept!r}")
        value = kept
    try:
        return KINDS[name].read(value)
    except (KeyError, ValueError):
        raise SettingError(f"{value!r} is not allowed", where=where, hint=f"allowed: {KINDS[name].allowed}") from None


def named_after(variable: str) -> list[str]:
    """The variable of the option that this one is named after."""
    option = variable.removeprefix(f"{PREFIX}_").lower()
    return [known for known, name in VARIABLES.items() if name == option]


def unknown(
    what: str, name: str, known: Collection[str], inductor: str = "", meant: Sequence[str] = (), where: str = ""
) -> NoReturn:
    """Raises; suggests what is `meant`, or the nearest of `known`, or one that has the name in it, or lists them, and
    says how Inductor's own options are written. `where` the name stood."""
    longer = sorted((k for k in known if len(name) > 3 and name in k), key=len)
    near = [*meant, *difflib.get_close_matches(name, known, n=1, cutoff=0.6), *longer]
    every = ", ".join(sorted(known))
    hint = f"did you mean {near[0]!r}?" if near else f"known: {every}" if len(every) < 1000 else "nothing is like it"
    if inductor:
        hint += f"; for Inductor, write {inductor!r}"
    raise SettingError(f"unknown {what} {name!r}", where=where, hint=hint)
