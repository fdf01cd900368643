"""Which versions of torch are tested, and imports of what stands on its private names.

Inductor has no interface for what a backend like this one needs, so any release of torch may take a name away or give
it another meaning. Nothing here imports torch before it is asked: the command answers --help without it.
"""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType

from coda_inductor.core.errors import BUG, BrokenInvariant, CodaError, Unsupported, forget_frames

TORCH = ((2, 11), (2, 15))
"""The first and the last minor release of torch that the tests pass on."""
TESTED = "{} to {} were tested".format(*(".".join(map(str, release)) for release in TORCH))

PLACE = re.compile(r" \((/.*|[A-Z]:.*|unknown location)\)$")
"""Where a module lies, at the end of what an ImportError says."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "4.8.1rc1" is (4, 8)."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def check_torch() -> None:
    """Raises Unsupported unless the torch that is imported here is a tested one."""
    first, last = TORCH
    if not first <= numbers(_torch())[:2] <= last:
        raise Unsupported(f"torch {_torch()} was not tested; {TESTED}")


def behind(module: str) -> ModuleType:
    """Imports a module of ours. Raises Unsupported, with the name, if a name that it needs is missing."""
    try:
        return import_module(module)
    except (ImportError, AttributeError) as error:
        raise missing(error) from None


def missing(error: ImportError | AttributeError) -> CodaError:
    """What to say of a name that is not there: a bug if it should be one of ours. The frames that the error came
    through are let go of."""
    forget_frames(error)
    owner = error.obj if isinstance(error, AttributeError) else None
    if str(getattr(owner, "__module__", getattr(owner, "__name__", ""))).startswith("coda_inductor"):
        return BrokenInvariant(str(error), hint=BUG)
    return Unsupported(f"{PLACE.sub('', str(error))}, with torch {_torch()}; {TESTED}")


def _torch() -> str:
    return str(import_module("torch").__version__)
