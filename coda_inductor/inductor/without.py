"""The program that is derived without a law, where a group stands that is derived with it: some Regions, and between
them what Inductor makes of the rest."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from coda_inductor.inductor.extract import Program, described, goes_on_with, on_the_way, piece, read, waits
from coda_inductor.inductor.group import Group, hint
from coda_inductor.inductor.rehearsal import Programs, rehearse
from coda_inductor.rewrite.plan import Plan

Wanted = tuple[list[fx.Node], frozenset[fx.Node]]
"""The nodes that Inductor makes at once, and those that are there before."""


@dataclass(frozen=True)
class Without:
    """A group of one plan, and of the `other` plan, of the same graph, the Regions that make a part of the same
    nodes."""

    group: Group
    plan: Plan
    rival: Group
    other: Plan

    @functools.cached_property
    def wanted(self) -> list[Wanted]:
        """What Inductor makes before each Region, as that reads it, and at the end. What the user's graph goes on with
        is made in passing, as a norm writes its statistics for the backward."""
        found, done = list[Wanted](), frozenset[fx.Node]()
        left = goes_on_with(self.group, self.plan)
        for built in self.rival.builts:
            nodes = [n for n in read(built, self.other, self.rival, self.group.mask) if n not in done]
            passed = on_the_way(self.group, self.plan, nodes, done)
            nodes += [n for n in left if n in passed and n not in nodes]
            found.append((nodes, done))
            done |= {*nodes, *built.draft.supplies, *built.draft.totals}
        return [*found, ([n for n in left if n not in done], done)]

    @functools.cached_property
    def pieces(self) -> list[Program | None]:
        """Inductor's programs, one for each of `wanted`."""
        return [piece(self.group, self.plan, nodes, done) for nodes, done in self.wanted]

    def key(self) -> str:
        """What the outcome depends on."""
        parts = [self.group.key(self.plan), self.rival.key(self.other)]
        parts += [described(*made[0].nodes) if made else "" for made in self.pieces]
        return "contest-" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]

    def steps(self, programs: Programs, cache_dir: str | None) -> list[Callable[[], object]]:
        """All in running order, on the tensors that the group has, and each on what those before it make."""
        values, late = self.rival.values, functools.partial(waits, self.plan, self.group.mask)
        values |= {k: v for k, v in self.group.values.items() if isinstance(k, fx.Node) and not late(k)}
        steps = list[Callable[[], object]]()
        for i, (nodes, _) in enumerate(self.wanted):
            if (made := self.pieces[i]) is not None:
                steps.append(self._run(programs, made, nodes))
            if i == len(self.rival.builts):
                break
            built = self.rival.builts[i]
            steps += programs.computations(self.other, self.rival, built)
            steps.append(rehearse(self.rival, built, cache_dir, anew=nodes))
            for node, stored in built.draft.supplies.items():
                values[node] = values[stored].reshape([hint(s) for s in node.meta["val"].shape])
        return steps

    def _run(self, programs: Programs, made: Program, nodes: list[fx.Node]) -> Callable[[], object]:
        """Runs one of Inductor's programs once, and returns it: what it makes become values of the rival."""
        graph, given = made
        tensors = [self.rival.value(node) for node in given]
        run = programs.compiled(graph, tensors)

        def step() -> None:
            self.rival.values.update(zip(nodes, run(*tensors), strict=True))

        step()
        return step
