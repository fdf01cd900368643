"""The two kinds of failure, and the one way to say one. Unsupported: the user's graph is fine and we leave it to
Inductor. BrokenInvariant: we are wrong."""

from __future__ import annotations

import re
import warnings

from coda_inductor.core.place import called_from
from coda_inductor.core.project import at

STRICTLY = "without CODA_INDUCTOR_STRICT it is left to Inductor"
QUIETLY = "CODA_INDUCTOR=0 does so without a warning"
BUG = f"a bug of ours, please report it{at('Issues')}; CODA_INDUCTOR=0 leaves everything to Inductor"
"""What to do about a failure that has no better hint: if it was raised, if it was warned about, and if it is ours."""


class CodaError(Exception):
    """What happened, where in the user's file, and what to do about it."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(f"{where}: {self.said}" if where else self.said)

    @property
    def said(self) -> str:
        """What happened, and what to do."""
        return f"{self.what} ({self.hint})" if self.hint else self.what


class Unsupported(CodaError):
    """The graph, device or setting is legitimate, but we do not handle it; counted, explained, left to Inductor."""


class BrokenInvariant(CodaError):
    """A bug of ours. Never caught, except by the outermost fallback that hands the untouched graph to Inductor."""


class CodaWarning(RuntimeWarning):
    """Something was not done our way: the text says what, why, and what the user may do."""


def forget_frames(error: BaseException) -> None:
    """Lets go of the frames that a handled error and its causes came through. Who still holds it, as a future does,
    would keep the frames of all callers, which Dynamo's optimizer for DistributedDataParallel expects to end."""
    seen, todo = set[int](), [error]
    while todo:
        held = todo.pop()
        held.__traceback__ = None
        seen.add(id(held))
        todo += [e for e in (held.__cause__, held.__context__) if e is not None and id(e) not in seen]


NUMBERS = re.compile(r"\b(0x[0-9a-f]+|[0-9a-f]{16,}|\d+(\.\d+)?(e[-+]?\d+)?)\b")
"""Addresses, digests, line numbers, sizes, errors; never a part of a word, as in "f16"."""

said: set[str] = set()
"""The warnings of this process, without their numbers."""


def warn(text: str) -> None:
    """Warns once in a process about each distinct failure: on another line, Region or size it is the same one. The
    warning's place is the user's line that led here (core/place.py)."""
    kind = NUMBERS.sub("#", text)
    if kind in said:
        return
    said.add(kind)
    message, frame = f"coda_inductor: {text}", called_from()
    if frame is None:
        warnings.warn(message, CodaWarning, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, CodaWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)
