"""What tuning measures: each group of Regions, as generated kernels, against what Inductor compiles of the same
nodes of the user's graph, or against the program that is derived without a law; on real tensors of the graph's sizes.

What they need is compiled ahead, on all cores. Results are kept on disk by content and never change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported, forget_frames
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import launch, library, limit, prebuild, record, store
from coda_inductor.kernels.ahead import Ahead
from coda_inductor.measure import free_memory, timing
from coda_inductor.measure.products import beside_products
from coda_inductor.measure.timing import Times
from coda_inductor.patterns.lift import Lifted
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.schedule.memory import Memory
from coda_inductor.schedule.model import saved_names
from coda_inductor.tuning import around, shipped
from coda_inductor.tuning.baseline import WithoutLaw
from coda_inductor.tuning.benchmark import Programs, benchmarked, in_order
from coda_inductor.tuning.extract import put_off
from coda_inductor.tuning.footprint import footprint
from coda_inductor.tuning.group import Group, mask, sizes, tokens
from coda_inductor.tuning.key import key_of
from coda_inductor.tuning.known import Known
from coda_inductor.tuning.outcome import (
    COSTS,
    TIMED,
    Outcome,
    compared_with,
    foreseen,
    hinted,
    in_bursts,
    outcome_of,
    passing_over,
    recorded,
    sure,
    timed,
    wins,
)

log = logging.getLogger("coda_inductor.tuning")

ROUNDS = 25
Record = dict[str, Any]
NO_TILES: Mapping[Region, Config] = {}


class Measurements:
    """Those of one graph, whose derivation may change between them."""

    def __init__(self, settings: Settings, device: torch.device, target: Target = SM_90A) -> None:
        self.settings, self.device, self.target = settings, device, target
        self.rows: list[dict[str, Any]] = []
        self.ahead = Ahead(settings.cache_dir)
        self._memory: Memory | None = None
        self._memory_of: Lifted | None = None  # whose graph a restored normaliser changes: numbers for rows
        self._saved: frozenset[str] | None = None
        self._plans = list[Known]()
        self._said = set[str]()  # the keys of the groups whose times were
        self._programs = Programs(settings)
        self.hints = shipped.hints(record.device_name()) if settings.hinted else shipped.Hints({})
        if settings.measures:
            prebuild.warm_up(target.name)

    def prepare(self, plan: Plan, candidates: list[list[Built]], later: Sequence[list[Built]] = ()) -> None:
        """Begins to compile what tuning will ask for, on all cores, and meanwhile compiles what the groups replace.
        Those that come `later` may yet be asked for."""
        if not self.settings.measures:
            return
        limit.keep_within(store.open_store(self.settings.cache_dir), self.settings.cache_limit)
        start_s = time.perf_counter()
        begun = self.begin(plan, candidates) + self.begin(plan, later, idle=True)
        unknown = self.unknown(plan, candidates)
        for members in unknown.values():
            if self.told(plan, members) is None:
                with passing_over():  # said where the group is measured
                    self.compile(plan, self.group(plan, members))
        seconds = time.perf_counter() - start_s
        said = "%d groups to measure, %d kernels to compile; meanwhile programs for the other side, %.1f s"
        log.info(said, len(unknown), begun, seconds)

    def unknown(self, plan: Plan, candidates: Sequence[list[Built]]) -> dict[str, list[Built]]:
        """The groups that nothing on disk tells of, by key: layers are alike."""
        found = dict[str, list[Built]]()
        for members in candidates:
            with contextlib.suppress(Unsupported):  # of a size that is not known
                group = self.group(plan, members)
                if self.found(plan, group) is None:
                    found[self.key(plan, group)] = members
        return found

    def begin(self, plan: Plan, candidates: Sequence[list[Built]], *, idle: bool = False) -> int:
        """Begins to compile the kernels of Regions that are not tuned; how many. (Whether their groups were measured
        takes seconds to find out, for which this does not wait.)"""
        if not self.settings.measures:
            return 0
        return self.ahead.begin(self.jobs(plan, (b for members in candidates for b in members)), idle=idle)

    def jobs(self, plan: Plan, builts: Iterable[Built]) -> list[prebuild.Job]:
        """The kernels of Regions that are not tuned: of one with a hint, that of its tile."""
        new = self.untuned(plan, builts)

        def configs(region: Region, size: int) -> Sequence[Config]:
            tile = self.hints.tile(region, size)
            return legality.candidates(region, size, self.target) if tile is None else (tile.config,)

        return [prebuild.Job(found[0], config, target=self.target.name) for found in new for config in configs(*found)]

    def untuned(self, plan: Plan, builts: Iterable[Built], *, hints: bool | None = None) -> list[tuple[Region, int]]:
        """The Regions of which no tile is remembered at their buckets; whether one from a hint counts, the settings say
        by default."""
        directory, hints = store.open_store(self.settings.cache_dir), self.settings.hinted if hints is None else hints
        known = functools.partial(record.remembered, directory, hints=hints, target=self.target)
        return [found for found in sizes(plan, builts, self.target) if known(*found) is None]

    def marked(self, found: Record, *sides: tuple[Plan, list[Built]]) -> Record:
        """The record of a measurement, as hinted if the tile of a Region that ran is."""
        by_hint = self.settings.hinted and any(self.untuned(*side, hints=False) for side in sides)
        return {**found, "hinted": True} if by_hint else found

    def counts(self, good: Callable[[Record], bool]) -> Callable[[Record], bool]:
        """Which of the records that are `good` count: those that a hint spared only where hints are on."""
        return good if self.settings.hinted else lambda found: good(found) and not hinted(found)

    def require_room(self, *sides: tuple[Group, Plan]) -> None:
        """Raises Unsupported if measuring these groups would take more memory than is free beside the model."""
        free_memory.require(self.device, sum(footprint(group, plan) for group, plan in sides))

    def compile(self, plan: Plan, group: Group) -> None:
        """Compiles what is timed beside the kernels."""
        self.require_room((group, plan))
        with torch.no_grad(), unset_fake_temporarily():
            for built in group.builts:
                self._programs.computations(plan, group, built)
            for nodes, program in (around.before(plan, group), around.after(plan, group)):
                self._programs.passes(group, nodes, program)
            self._programs.baseline(group, plan)

    def turned(self, plan: Plan, builts: Iterable[Built]) -> Iterator[prebuild.Job]:
        """The tuned kernels of two weights for weights that lie in the other order in memory, which are not on disk: in
        which order they do is known when the graph runs, and compiling the kernel then takes seconds. Inductor compiles
        the graph meanwhile."""
        if not self.settings.measures:
            return
        directory = store.open_store(self.settings.cache_dir)
        two = [b for b in builts if len(b.region.products) == 2 and not b.region.half]
        for region, size in sizes(plan, two, self.target):
            config = record.remembered(directory, region, size, target=self.target)
            if config is not None and not library.kept(region, config, directory, swapped=True, target=self.target):
                yield prebuild.Job(region, config, swapped=True, target=self.target.name)

    def group(self, plan: Plan, members: list[Built]) -> Group:
        """The members, at the size to measure at."""
        if self._memory is None or self._memory_of is not plan.program.lifted:
            graph = plan.program.lifted.graph
            if self._saved is None:  # (It takes seconds for many layers, and nothing is timed without tuning.)
                self._saved = saved_names(graph) if self.settings.measures else frozenset()
            self._memory, self._memory_of = Memory(graph, self._saved), plan.program.lifted
        known = self.of(plan)
        group = Group(members, self.device, tokens(plan, members[0]), self._memory, known.before(members))
        known.surround(group, lawless=not deferred(plan, members))
        return group

    def of(self, plan: Plan) -> Known:
        """What was found out about a plan; of the last two, which are compared."""
        for known in self._plans:
            if known.plan is plan:
                return known
        self._plans = [*self._plans[-1:], Known(plan)]
        return self._plans[-1]

    def key(self, plan: Plan, group: Group) -> str:
        """The group's key."""
        keys = self.of(plan).keys
        if group.mask not in keys:
            keys[group.mask] = key_of(group, plan, self.settings)
        return keys[group.mask]

    def found(self, plan: Plan, group: Group) -> dict[str, Any] | None:
        """What was measured before."""
        return store.read_record(store.open_store(self.settings.cache_dir), self.key(plan, group), self.counts(timed))

    def known(self, plan: Plan, members: list[Built]) -> bool:
        """Was the group measured for an earlier plan?"""
        with contextlib.suppress(Unsupported):  # of a size that is not known
            return bool(self._said) and self.key(plan, self.group(plan, members)) in self._said
        return False

    def outcome(self, plan: Plan, members: list[Built]) -> Outcome:
        """How a group fares; it wins if nothing is to be measured."""
        group = self.group(plan, members)
        if not self.settings.measures:
            self.build(group)
            return Outcome(group.mask)
        key, found = self.key(plan, group), self.found(plan, group)
        if found is None:
            start_s = time.perf_counter()
            self.ahead.wait(self.jobs(plan, members))
            built_s = time.perf_counter()
            measured = self.by_hint(plan, members) or self.searched(plan, members)
            measured = self.marked(measured, (plan, members))
            log.info("waited %.1f s for kernels, measured %.1f s", built_s - start_s, time.perf_counter() - built_s)
            found = store.write_record(store.open_store(self.settings.cache_dir), key, measured, self.counts(timed))
        self.say(key, found)
        if not self.target.tested:
            self.build(group)  # what another process measured has to be right here
        return outcome_of(group.mask, found)

    def build(self, group: Group) -> None:
        """Builds the group's kernels at its tokens. Raises Unsupported if one cannot be built, or may not run here."""
        with self.real_tensors():
            for b in group.builts:
                fixed = self.settings.deterministic
                launch.kernel(b.region.text, self.settings.cache_dir, measured=not fixed).build(group.tokens)

    def say(self, key: str, found: Record) -> None:
        """Reports a record, and logs it once."""
        self.rows.append(found)
        if key not in self._said:
            self._said.add(key)
            said = ", ".join(f"{name} {found[name]:.4f}" for name in TIMED if name in found)
            log.info("%s: %s", " against ".join("+".join(found[w]) for w in ("regions", "against") if w in found), said)

    def searched(self, plan: Plan, members: list[Built]) -> dict[str, Any]:
        """The record of a group whose Regions are tuned. (Where a hint did not hold, their kernels are begun only
        now.)"""
        jobs = self.jobs(plan, members)
        self.ahead.begin(jobs)
        self.ahead.wait(jobs)
        return self.measure(self.group(plan, members), plan)

    def told(self, plan: Plan, members: list[Built]) -> shipped.Expected | None:
        """How hints say that a group fares, if they know of each of its Regions how fast it is; None without hints."""
        if not self.settings.hinted:
            return None
        with contextlib.suppress(Unsupported):  # of a size that is not known
            size = legality.bucket(tokens(plan, members[0]))
            expected = self.hints.group([b.region for b in members], size)
            tiles = (self.hints.tile(*found) for found in self.untuned(plan, members))
            if expected is not None and all(tile is not None and tile.share is not None for tile in tiles):
                return expected
        return None

    def by_hint(self, plan: Plan, members: list[Built]) -> dict[str, Any] | None:
        """The record of a group of which hints tell, if one timing shows that its kernels are as they say: its tiles
        are remembered then. None if there are no hints, or they do not hold; then these are refused, and nothing is
        remembered."""
        directory, group = store.open_store(self.settings.cache_dir), self.group(plan, members)
        expected = self.told(plan, members)
        new = self.untuned(plan, members)
        tiles = {found: tile for found in new if (tile := self.hints.tile(*found)) is not None}
        if not tiles and expected is None:
            return None
        of = {region: tile for (region, _), tile in tiles.items()}
        try:
            if expected is not None:
                found = self.check(group, plan, of, expected)
            else:
                found = self.measure(group, plan, {region: tile.config for region, tile in of.items()})
            holds = expected is not None or not outcome_of(group.mask, found).loses
        except Exception as error:
            if not foreseen(error):
                raise
            log.info("a hint does not hold: %s", error)
            forget_frames(error)
            found, holds = {}, False
        if not holds:
            log.info("searched: %s", "+".join(group.digests))
            self.hints.refused.update(tiles)
            return None
        for (region, size), tile in tiles.items():
            standing = record.remember(directory, region, size, tile.config, None, [], target=self.target)
            launch.kernel(region.text, self.settings.cache_dir).use(size, standing)
        return found

    def check(
        self, group: Group, plan: Plan, tiles: Mapping[Region, shipped.Tile], expected: shipped.Expected
    ) -> dict[str, Any]:
        """A group's record as hints say it, each of whose kernels is right and as fast as they say, beside plain
        products. Its other side takes as many times as long as they say. Raises Unsupported otherwise."""
        self.require_room((group, plan))
        with self.real_tensors():
            times = dict[Region, float]()
            for built in group.builts:
                region, tile = built.region, tiles.get(built.region)
                group.draw(built)
                run = benchmarked(group, built, self.settings, tile=tile.config if tile else None)
                if region not in times:
                    found = beside_products(run, region, group.inputs(built))
                    if found is None:
                        raise Unsupported(f"region {region.digest} cannot be compared with plain products")
                    times[region] = found[0]
                    if tile is not None and not tile.holds(found[0] / found[1]):
                        share = f"{found[0] / found[1]:.3f} of the time of plain products, {tile.share} was said"
                        raise Unsupported(f"region {region.digest} in {tile.config} takes {share}")
        ms = sum(times[b.region] for b in group.builts)
        row = self.row(group, [Times(ms, math.inf), Times(ms * expected.ratio, math.inf)])
        stands = {} if expected.stands is None else {"stands": expected.stands}
        return {**row, "hinted": True, "wins": expected.wins, **stands}

    def row(self, group: Group, times: Sequence[Times]) -> dict[str, Any]:
        """The record of a measurement of both sides."""
        return {**recorded(group.digests, times), "bucket": legality.bucket(group.tokens), **record.where()}

    def measure(self, group: Group, plan: Plan, tiles: Mapping[Region, Config] = NO_TILES) -> dict[str, Any]:
        """Tunes the group's kernels, then times both ways. How narrowly it wins matters only to a law."""
        self.require_room((group, plan))
        lawless = not deferred(plan, group.builts)
        with self.real_tensors():
            fused, before = self.fused(group, plan, tiles), self._programs.baseline(group, plan)
            decided = lambda turns: not wins(turns) or sure(turns, lawless=lawless)  # noqa: E731
            times = timing.compared([fused, before], ROUNDS, decided=decided)
        return self.row(group, times)

    def against(self, plan: Plan, members: list[Built], other: Plan, parts: list[Built]) -> Outcome:
        """How a group fares against the program that is derived without its law, in the same burst: the Regions of that
        which win alone, and what Inductor makes of the rest."""
        size = legality.bucket(tokens(plan, members[0]))
        if (ratio := self.hints.law([b.region for b in members], [b.region for b in parts], size)) is not None:
            log.info("a law that falls, as a hint says: %s", "+".join(b.region.digest for b in members))
            return Outcome(mask(members), Times(1.0, 1.0), Times(ratio, ratio))
        group, rival = (
            self.group(plan, members),
            dataclasses.replace(self.group(other, parts), taken=[], loops=set(), after=set()),
        )
        without = WithoutLaw(group, plan, rival, other)
        key = without.key(self.settings)
        found = store.read_record(store.open_store(self.settings.cache_dir), key, self.counts(compared_with))
        if found is None:
            self.require_room((group, plan), (rival, other))
            margin = self.margin(plan, members)
            with self.real_tensors():
                calls = [self.fused(group, plan), in_order(without.steps(self._programs, self.settings))]
                times = in_bursts(lambda: timing.compared(calls, ROUNDS), margin)
            found = {"against": rival.digests, "margin": margin, **self.row(group, times)}
            found = self.marked(found, (plan, members), (other, parts))
            found = store.write_record(
                store.open_store(self.settings.cache_dir), key, found, self.counts(compared_with)
            )
        self.say(key, found)
        return outcome_of(group.mask, found)

    def stands(self, plan: Plan, members: list[Built]) -> bool:
        """Does a hint say that a law is worth it, so that the program without it need not be prepared?"""
        with contextlib.suppress(Unsupported):  # of a size that is not known
            size = legality.bucket(tokens(plan, members[0]))
            said = self.hints.group([b.region for b in members], size)
            return said is not None and said.wins and said.stands is True
        return False

    def margin(self, plan: Plan, members: list[Built]) -> float:
        """How much more than the program without its law a group may take: what equal calls differ by, but nothing if
        it leaves to the backward what takes time there, too."""
        return 0.0 if put_off(self.group(plan, members), plan) else COSTS

    @contextlib.contextmanager
    def real_tensors(self) -> Iterator[None]:
        """Within, tensors are real, on the graph's device."""
        here = torch.cuda.device(-1 if self.device.index is None else self.device.index)
        with torch.no_grad(), unset_fake_temporarily(), here:
            yield

    def fused(self, group: Group, plan: Plan, tiles: Mapping[Region, Config] = NO_TILES) -> Callable[[], None]:
        """The group's side: its kernels, which are tuned before or run in these tiles, what they need beside them, and
        the loops around."""
        (first, before), (last, after) = around.before(plan, group), around.after(plan, group)
        steps = self._programs.passes(group, first, before)
        for built in group.builts:
            steps += self._programs.computations(plan, group, built)
            steps.append(benchmarked(group, built, self.settings, {*first}, tiles.get(built.region)))
        steps += self._programs.passes(group, last, after)
        # What the forward is spared is written by a pass of the backward that reads the same anyway.
        return in_order([*steps, *(group.like(node).zero_ for node in put_off(group, plan))])


def deferred(plan: Plan, members: list[Built]) -> int:
    """The products of a group (a bit set) whose operands a law defers."""
    bits = {acc.bit for b in members for acc in b.draft.space.accs}
    return sum(1 << bit for bit in {f.product for f in plan.firings} & bits)
