"""The two kinds of failure. Unsupported: the user's graph is fine, Inductor takes it. BrokenInvariant: we are wrong."""

from __future__ import annotations


class CodaError(Exception):
    """What happened, where in the user's file, and what to do about it."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__("".join((f"{where}: " if where else "", what, f" ({hint})" if hint else "")))


class Unsupported(CodaError):
    """The graph, device or setting is legitimate, but we do not handle it; counted, explained, left to Inductor."""


class BrokenInvariant(CodaError):
    """A bug of ours. Never caught, except by the outermost fallback that hands the untouched graph to Inductor."""
