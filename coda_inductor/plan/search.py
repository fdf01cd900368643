"""Deriving, planning and building, again and again until no two decisions exclude each other."""

from __future__ import annotations

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.patterns.lift import Lifted
from coda_inductor.plan.accumulated import addend, reads
from coda_inductor.plan.build import build
from coda_inductor.plan.cycles import circular
from coda_inductor.plan.draft import CROWDED, Conflict, Root
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.trim import find_used, trim
from coda_inductor.plan.twice import twice
from coda_inductor.rewrite.derive import derive
from coda_inductor.rewrite.laws import LAWS
from coda_inductor.rewrite.limits import NONE, Limits
from coda_inductor.rewrite.program import Program

ALL = frozenset(law.name for law in LAWS)


def plan(lifted: Lifted, laws: frozenset[str] = ALL, limits: Limits = NONE) -> Plan:
    """The plan of a lifted graph within the limits, with its Regions built. The limits that it found itself are those
    of its program."""
    while True:  # each round adds to one of the limits, which are finite, or is the last
        program = Program(lifted, limits)
        made = Plan(program, derive(program, laws))
        try:
            made.run()
            trim(made)
            more = Limits(crowded=_crowded(made), unrooted=_unrooted(made))
            if limits.holds(more):
                # both as they were before any product is added to another
                read, used = reads(made), find_used(made).seen
                for draft in made.unique():
                    other = addend(made, draft, read) if draft.space.accs[0] not in made.taken_in else None
                    if other is not None:
                        draft.added = other
                        made.taken_in.add(other)
                made.builts = [build(made, draft) for draft in made.unique()]
                if not (more := circular(made)):
                    if left := twice(made, used):
                        raise Conflict(left)
                    return made
        except Conflict as conflict:
            more = _unsummed(made, conflict.limits) or conflict.limits
            if limits.holds(more):
                raise BrokenInvariant(f"planning does not settle: {conflict}") from conflict
        limits |= more


def _unsummed(made: Plan, conflict: Limits) -> Limits:
    """What is tried before a conflict's products become no Regions, or have no halves: no sums over heads."""
    denied = {**conflict.whole_heads, **conflict.banned}
    known = made.program.limits.unsummed_heads
    return Limits(
        unsummed_heads={b: why for b, why in denied.items() if b in made.program.head_sums and b not in known}
    )


def _crowded(made: Plan) -> int:
    """The products of epilogues that read more than CROWDED vectors and tiles."""
    bits = 0
    for d in made.unique():
        if len(made.loads(d, *d.values)) > CROWDED:
            bits |= d.space.mask
    return bits


def _unrooted(made: Plan) -> int:
    """The products of epilogues that take the root of a square although they read all tiles that the root is of."""
    bits = 0
    for d in made.unique():
        loads = made.loads(d, *d.values)
        roots = (x for x, source in loads.items() if isinstance(source, Root))
        if any(made.program.bases(x, d.space) <= loads.keys() - {x} for x in roots):
            bits |= d.space.mask
    return bits
