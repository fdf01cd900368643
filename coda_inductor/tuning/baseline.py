"""The program that is derived without a law, where a group stands that is derived with it: some Regions, and between
them what Inductor makes of the rest."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx

from coda_inductor.core.settings import Settings
from coda_inductor.plan.plan import Plan
from coda_inductor.tuning.benchmark import Programs, benchmarked
from coda_inductor.tuning.extract import Program, described, goes_on_with, on_the_way, piece, read, waits
from coda_inductor.tuning.group import Group
from coda_inductor.tuning.key import key_of

Wanted = tuple[list[fx.Node], frozenset[fx.Node]]
"""The nodes that Inductor makes at once, and those that are there before."""


@dataclass(frozen=True)
class WithoutLaw:
    """A group of one plan, and of the `other` plan, of the same graph, the Regions that make a part of the same
    nodes."""

    group: Group
    plan: Plan
    rival: Group
    other: Plan

    @functools.cached_property
    def wanted(self) -> list[Wanted]:
        """What Inductor makes before each Region, as that reads it, and at the end. What the user's graph goes on with
        is made in passing, as a norm writes its statistics for the backward, and so is what lies in memory and a later
        program reads."""
        found, done, nodes = list[Wanted](), frozenset[fx.Node](), self.plan.program.lifted.graph.nodes
        way = functools.partial(on_the_way, self.group, self.plan)
        supplied = [b.draft.nodes for b in self.rival.builts]
        asked = [read(b, self.other, self.rival, self.group.mask) for b in self.rival.builts]
        asked.append([n for n in goes_on_with(self.group, self.plan) if not self.stored_plain(n)])
        for i, names in enumerate(asked):
            wanted = [n for n in names if n not in done]
            there = done.union(wanted, *supplied)
            later = way([n for more in asked[i + 1 :] for n in more if n not in there], there)
            passed = way(wanted, done) - {*wanted}
            wanted += [n for n in nodes if n in passed and (n in asked[-1] or (n in later and self._in_memory(n)))]
            found.append((wanted, done))
            done = done.union(wanted, *supplied[i : i + 1])
        return found

    def stored_plain(self, node: fx.Node) -> bool:
        """Is the node a product with its bias, which a Region of the rival stores without, to be made of that later?"""
        program = self.other.program
        if not any(p.node is node for p in program.lifted.products.values()):
            return False
        whole = program.new[program.lifted.term[node]]
        drafts = [b.draft for b in self.rival.builts]
        stored = [(d.space, {s.term for s in d.stores}) for d in drafts if node not in d.supplies]
        return any(whole not in terms and program.bases(whole, space) & terms for space, terms in stored)

    def _in_memory(self, node: fx.Node) -> bool:
        """Is the node a tensor in memory, of itself or as one of several?"""
        there = self.group.memory.holds(node) or node.target is operator.getitem
        return there and isinstance(node.meta["val"], Tensor)

    @functools.cached_property
    def pieces(self) -> list[Program | None]:
        """Inductor's programs, one for each of `wanted`."""
        return [piece(self.group, self.plan, nodes, done) for nodes, done in self.wanted]

    def key(self, settings: Settings) -> str:
        """What the outcome depends on."""
        parts = [key_of(self.group, self.plan, settings), key_of(self.rival, self.other, settings)]
        parts += [described(*made[0].nodes) if made else "" for made in self.pieces]
        return "contest-" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]

    def steps(self, programs: Programs, settings: Settings) -> list[Callable[[], object]]:
        """All in running order, on the tensors that the group has. Each reads the tiles that those before it made (of
        small computations, which are vectors, and of views what was made first)."""
        values, late = self.rival.values, functools.partial(waits, self.plan, self.group.mask)
        values |= {k: v for k, v in self.group.values.items() if isinstance(k, fx.Node) and not late(k)}
        steps, made = list[Callable[[], object]](), set[fx.Node]()
        for i, (nodes, _) in enumerate(self.wanted):
            if (program := self.pieces[i]) is not None:
                made.update(nodes)
            steps += programs.passes(self.rival, nodes, program)
            if i == len(self.rival.builts):
                break
            built = self.rival.builts[i]
            steps += programs.computations(self.other, self.rival, built)
            steps.append(benchmarked(self.rival, built, settings, anew=made))
        return steps
