"""All that may not be: one record, which planning, legality and measurement add to and hand on whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may not do. Products are named by their bit's number; a bit set is an int.

    `banned` products become no Region, for the given reasons. The operands of `undeferred` products (a bit set) stay as
    the user wrote them. The heads of `whole_heads` are not divided into the two halves of a rotary embedding, for the
    given reasons, "" where another limit says why. Nor are the columns of each head of `unsummed_heads` added up.
    To the accumulators of `unaccumulated` no other product is added, and epilogues of `only_accumulated` do nothing
    else, for the given reasons. Nodes of the forward that `never` may be made again in the backward are kept. Epilogues
    of `crowded` products (a bit set) would read too many vectors if they combined them themselves. Epilogues of
    `unrooted` products (a bit set) read anyway what a square is made of, and take no root of it. No sum beside an
    operation that is left whole reads the nodes of these names, `unread`: they would be kept for it alone, or may be
    overwritten before.
    """

    banned: Mapping[int, str] = field(default_factory=dict)
    undeferred: int = 0
    whole_heads: Mapping[int, str] = field(default_factory=dict)
    unaccumulated: frozenset[int] = frozenset()
    only_accumulated: Mapping[int, str] = field(default_factory=dict)
    never: frozenset[fx.Node] = frozenset()
    crowded: int = 0
    unrooted: int = 0
    unread: frozenset[str] = frozenset()
    unsummed_heads: Mapping[int, str] = field(default_factory=dict)

    def __or__(self, other: Limits) -> Limits:
        """Both; where both give a reason, the other's."""
        heads = {bit: why for bit, why in other.whole_heads.items() if why or bit not in self.whole_heads}
        return Limits(
            {**self.banned, **other.banned},
            self.undeferred | other.undeferred,
            {**self.whole_heads, **heads},
            self.unaccumulated | other.unaccumulated,
            {**self.only_accumulated, **other.only_accumulated},
            self.never | other.never,
            self.crowded | other.crowded,
            self.unrooted | other.unrooted,
            self.unread | other.unread,
            {**self.unsummed_heads, **other.unsummed_heads},
        )

    def __bool__(self) -> bool:
        """Is anything limited?"""
        return self != Limits()

    def holds(self, other: Limits) -> bool:
        """Is all that the other limits limited here?"""
        return (
            other.banned.keys() <= self.banned.keys()
            and not other.undeferred & ~self.undeferred
            and other.whole_heads.keys() <= self.whole_heads.keys()
            and other.unsummed_heads.keys() <= self.unsummed_heads.keys()
            and other.unaccumulated <= self.unaccumulated
            and other.only_accumulated.keys() <= self.only_accumulated.keys()
            and other.never <= self.never
            and not other.crowded & ~self.crowded
            and not other.unrooted & ~self.unrooted
            and other.unread <= self.unread
        )


NONE = Limits()
