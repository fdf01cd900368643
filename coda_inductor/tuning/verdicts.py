"""Who decides on what is derived: which records the target can run, and what a measurement found slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coda_inductor.core.region import Region
from coda_inductor.core.sweep import Sweep
from coda_inductor.passes import plain, sweeps
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """Products (by bit) to leave to Inductor, with the reason, and those (a bit set) whose operands stay as written."""

    banned: dict[int, str] = field(default_factory=dict)
    undeferred: int = 0

    @property
    def settled(self) -> bool:
        """Does everything stay as it is?"""
        return not self.banned and not self.undeferred


Legal = Callable[[Region | Sweep], None]
Decide = Callable[[Plan, list[Built]], Verdict]
NO_CONTEST: Decide = lambda plan, builts: Verdict()  # noqa: E731


@dataclass(frozen=True, slots=True)
class Judges:
    """Those of one graph. `legal` raises Unsupported for what the target cannot run; `decide` says what a measurement
    found slower of a plan's Regions, `slower_bare` of products that do nothing else, `slower_sweeps` of Sweeps."""

    legal: Legal = lambda record: None
    decide: Decide = NO_CONTEST
    slower_bare: plain.Slower = plain.NONE_SLOWER
    slower_sweeps: sweeps.Slower = sweeps.NONE_SLOWER


NOBODY = Judges()
"""Everything passes."""
