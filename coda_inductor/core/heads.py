"""Sums over the columns of each head, as a norm of each head takes: what they add up, said of one accumulator.

A kernel takes them of the whole tile before it stores anything, number by number. It does not know then in which half
of a head a number stands. So both halves must be computed alike: of v0 = a r + bias_0 and v1 = b r + bias_1 it adds up
the squares of acc r + bias.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.ops import OF_PAIRS, OVER_HEAD
from coda_inductor.core.region import Let, Region

ACC = "acc"
"""The accumulator, whichever half it is."""
VECTORS = ("token", "feature", "sample")


@dataclass(slots=True)
class Summand:
    """What one half adds to a sum: statements over ACC and operands, and the name of their result."""

    region: Region
    lane: int
    lets: list[Let] = field(default_factory=list)
    value: str = ""
    _known: dict[str, str] = field(default_factory=dict)

    def name(self, of: str) -> str:
        """What a value is called here. Raises Unsupported if it is not computed of this half alone."""
        if of not in self._known:
            self._known[of] = self._name(of)
        return self._known[of]

    def _name(self, of: str) -> str:
        region, products = self.region, [p.name for p in self.region.products]
        if of in products:
            if products.index(of) != self.lane:
                raise Unsupported("a sum over heads of what mixes their halves")
            return ACC
        if (extent := next((o.extent for o in region.operands if o.name == of), None)) is not None:
            if extent not in VECTORS:
                raise Unsupported(f"a sum over heads of what a {extent} is in")
            return of
        let = next(let for let in region.lets if let.name == of)
        if let.op == OVER_HEAD:
            raise Unsupported("a sum over heads within another")
        if let.op in OF_PAIRS and OF_PAIRS.index(let.op) != self.lane:
            raise Unsupported("a sum over heads of what mixes their halves")
        args = tuple(self.name(a) if isinstance(a, str) else a for a in let.args)
        if let.op in OF_PAIRS:
            return str(args[0])
        self.lets.append(Let(f"p{len(self.lets)}", let.op, args))
        return self.lets[-1].name


def over_heads(region: Region) -> list[Let]:
    """The sums over heads."""
    return [let for let in region.lets if let.op == OVER_HEAD]


def summand(region: Region, total: Let) -> Summand:
    """What a sum over heads adds up. Raises Unsupported if no kernel can take it."""
    halves = list[Summand]()
    for lane, value in enumerate(total.args[: len(region.products)]):
        halves.append(Summand(region, lane))
        halves[-1].value = halves[-1].name(str(value))
    if any((half.lets, half.value) != (halves[0].lets, halves[0].value) for half in halves):
        raise Unsupported("a sum over heads whose halves are computed otherwise")
    return halves[0]


def columns(region: Region, total: Let) -> int:
    """Of its heads, in accumulators."""
    return int(total.args[2]) * (2 if region.half else 1)
