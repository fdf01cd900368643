"""What a rewriting did, as records: for reports, `explain` and tests; and why it begins anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coda_inductor.attention.changes import Changed
from coda_inductor.attention.masks import Mask
from coda_inductor.core.region import Region
from coda_inductor.passes.blocks import Blocks
from coda_inductor.passes.casts import Cast
from coda_inductor.passes.elementwise import Pass
from coda_inductor.passes.tables import Table


@dataclass(frozen=True, slots=True)
class Site:
    """One Region in the graph. `absorbed` are the original nodes whose work now happens in it, `outputs` what it
    supplies."""

    name: str
    region: Region
    m: str
    laws: tuple[str, ...]
    absorbed: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that follows a product but stays with Inductor: the first condition that failed, and the user's line."""

    node: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rewrite did."""

    sites: tuple[Site, ...] = ()
    refused: tuple[Refusal, ...] = ()
    opaque: tuple[Refusal, ...] = ()
    """Operations that were not understood at all."""
    tables: tuple[Table, ...] = ()
    """What is computed once for many elements."""
    casts: tuple[Cast, ...] = ()
    """What was cast, or multiplied by a number, elsewhere than it is now."""
    elementwise: tuple[Pass, ...] = ()
    """Casts to 8 bits, in rows and transposed, that read their tensor once."""
    blocks: tuple[Blocks, ...] = ()
    """Scores, or their gradients, that are made by blocks of rows."""
    masks: tuple[Mask, ...] = ()
    """Masks that attention reads no more, since they hide exactly the later tokens, or nothing."""
    grouped: tuple[Changed, ...] = ()
    """Attention that reads keys and values once which were repeated for several heads, or what was copied."""
    rewrote: bool = False
    """Is the graph another than it was?"""
    seconds: float = 0.0
    backward: tuple[int, int] = (0, 0)
    """Of tuning: how many of the backward's Regions, as they were first derived, are kept, and how many there were.
    (One counts as kept if all its products are in Regions, whichever.)"""
    timings: tuple[dict[str, Any], ...] = ()
    """What was measured, in its order: the digests of a group's Regions, "ms" and Inductor's "baseline_ms",
    and, unless these decided, the same two with "busy_" before them: what they add to a busy GPU, or, of long calls,
    the same again (timing.Times). Where it says "against", the other side is not Inductor but the program without a
    law, with these Regions."""


class RewriteAgain(Exception):
    """The graph is rewritten once more. Not all parts of some products became Regions, or two products did not
    meet in one accumulator: these stay `whole`. Or the backward would keep too much for sums: nodes stay `unread` by
    them."""

    def __init__(self, whole: frozenset[str] = frozenset(), unread: frozenset[str] = frozenset()) -> None:
        super().__init__(", ".join(sorted(whole | unread)))
        self.whole, self.unread = whole, unread
