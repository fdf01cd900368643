"""Who decides on what is derived: which records the target can run, and what a measurement found slower."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.passes import plain
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import NONE, Limits

Legal = Callable[[Region], None]
Decide = Callable[[Plan, list[Built]], Limits]
UNTUNED: Decide = lambda plan, builts: NONE  # noqa: E731


@dataclass(frozen=True, slots=True)
class Decisions:
    """Those of one graph. `legal` raises Unsupported for what the target cannot run; `decide` says what a measurement
    found slower of a plan's Regions, `slower_plain` of products that do nothing else."""

    legal: Legal = lambda record: None
    decide: Decide = UNTUNED
    slower_plain: plain.Slower = plain.NONE_SLOWER


def without_regions(decisions: Decisions, names: Set[str], met: set[str]) -> Decisions:
    """The decisions, by which no Region is legal whose digest is among these names; those that there were are `met`."""

    def legal(region: Region) -> None:
        if region.digest in names:
            met.add(region.digest)
            raise Unsupported(f"region {region.digest} is switched off")
        decisions.legal(region)

    return replace(decisions, legal=legal)


ACCEPT_ALL = Decisions()
"""Everything passes."""
