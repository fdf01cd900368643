"""Deriving, planning and building, again and again until no two decisions exclude each other."""

from __future__ import annotations

from torch import fx

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.patterns.lift import Lifted
from coda_inductor.plan.again import Again
from coda_inductor.plan.build import build
from coda_inductor.plan.draft import CROWDED, Conflict
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.trim import trim
from coda_inductor.rewrite.derive import derive
from coda_inductor.rewrite.laws import LAWS
from coda_inductor.rewrite.program import Program

ALL = frozenset(law.name for law in LAWS)


def plan(
    lifted: Lifted,
    laws: frozenset[str] = ALL,
    banned: dict[int, str] | None = None,
    undeferred: int = 0,
    unhalved: frozenset[int] = frozenset(),
    unsummed: frozenset[int] = frozenset(),
    only_summed: dict[int, str] | None = None,
) -> Plan:
    """The plan of a lifted graph, with its Regions built. `banned` products (by bit) are left to Inductor for the given
    reasons; the operands of `undeferred` ones (a bit set) stay as the user wrote them; the heads of `unhalved` ones are
    not halved; to the sums of `unsummed` ones no other product is added, and epilogues of `only_summed` ones do nothing
    else, for the given reasons."""
    bans, never, crowded = dict(banned or {}), frozenset[fx.Node](), 0
    while True:  # each round adds to one of five finite sets, or is the last
        as_written = frozenset(i for i in lifted.products if undeferred >> i & 1)
        program = Program(lifted, bans, as_written, unhalved, unsummed, only_summed or {})
        made = Plan(program, derive(program, laws), again=Again(never), crowded=crowded)
        try:
            made.run()
            trim(made)
            if not (more := _crowded(made) & ~crowded):
                made.builts = [build(made, draft) for draft in made.unique()]  # which asks once more
                return made
            crowded |= more
        except Conflict as conflict:
            known = conflict.banned.keys() <= bans.keys() and conflict.never <= never and conflict.unhalved <= unhalved
            if known and not conflict.undeferred & ~undeferred:
                raise BrokenInvariant(f"planning does not settle: {conflict}") from conflict
            bans |= conflict.banned
            undeferred |= conflict.undeferred
            never |= conflict.never
            unhalved |= conflict.unhalved


def _crowded(made: Plan) -> int:
    """The products of epilogues that read more than CROWDED vectors and tiles."""
    bits = 0
    for d in made.unique():
        if len(made.loads(d, *d.values)) > CROWDED:
            bits |= d.space.mask
    return bits
