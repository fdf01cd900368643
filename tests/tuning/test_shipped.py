"""Shipped tunings spare a search where one timing shows what they say, and cost a little time where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_cases import token_scale
from compiling import Interpreted, Ran, begun, close, half, pretend, run, streams
from torch import Tensor

from coda_inductor.codegen import legality
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.caches import hints
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.kernels import prebuild, record, store
from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from coda_inductor.tuning import benchmark, outcome, shipped
from coda_inductor.tuning.measurements import Measurements
from coda_inductor.tuning.tuner import Tuner

W = torch.randn(64, 64, dtype=torch.bfloat16)
X, T = torch.randn(320, 64, dtype=torch.bfloat16), torch.rand(320, dtype=torch.bfloat16)
SIZE = 512  # the bucket of 320 tokens


def silu(x: Tensor, t: Tensor) -> Tensor:
    return F.silu(F.linear(x, W)) * t[:, None]


@dataclass
class Machine:
    """One that is pretended: what it was asked to compile and to time, and how long each call takes there."""

    folder: Path
    turns: list[float] = field(default_factory=lambda: [1.0, 2.0])  # of a group and of the other side
    beside: list[float] = field(default_factory=lambda: [1.1, 1.0])  # of a kernel and of plain products
    best: Config | None = None
    order: Sequence[Config] = ()
    built: list[prebuild.Job] = field(default_factory=list)
    programs: int = 0  # that Inductor compiled for the other side
    checked: int = 0  # kernels beside plain products: no search does so
    searched: int = 0

    def store(self) -> Path:
        return store.open_store(str(self.folder / "kernels"))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted((self.store() / "tuning").glob("*.json"))]

    def tilings(self) -> list[tuple[str, bool]]:
        found = [r for r in self.records() if "config" in r]
        return [(str(Config(**r["config"])), r.get("hinted", False)) for r in found]


New = Callable[..., Machine]


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> New:
    """A machine with a store of its own and this folder of hints."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "hints")

    def made(name: str, build: Callable[..., Any] = Interpreted, **fields: Any) -> Machine:
        machine = Machine(tmp_path / name, **fields)
        pretend(monkeypatch, machine.folder, build)
        shipped._rows.cache_clear()
        shipped.digest.cache_clear()

        def begin(jobs: Sequence[prebuild.Job], *args: Any, **how: Any) -> Any:
            machine.built += jobs
            return begun(jobs, *args, **how)

        def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[Times]:
            machine.searched += 1
            if "level" in how:  # tiles
                best = next((i for i, row in enumerate(machine.order) if row == machine.best), 0)
                return [Times(1.0 + (i != best), 1.0 + (i != best)) for i in range(len(calls))]
            return [Times(ms, ms) for ms in machine.turns]

        def by_turns(calls: Sequence[Callable[[], object]], rounds: int, launching: Any) -> list[float]:
            machine.checked += 1
            for call in calls:
                call()
            return machine.beside

        def program(module: Any, *_: Any) -> Any:
            machine.programs += 1
            return module

        monkeypatch.setattr(benchmark, "_compile", program)
        machine.order = legality.candidates(region_of(), SIZE)
        monkeypatch.setattr(prebuild, "begin", begin)
        monkeypatch.setattr(timing, "compared", compared)
        monkeypatch.setattr(timing, "by_turns", by_turns)
        monkeypatch.setattr(timing, "launching", lambda calls: [0.0] * len(calls))
        return machine

    return made


def region_of() -> Region:
    return token_scale(64, 64)


def compiled(f: Callable[..., Any] = silu, *args: Tensor, **how: Any) -> Ran:
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        return run(f, *(args or (X, T)), **({"options": {"hints": True}} | how))


def write(machine: Machine, tmp_path: Path) -> dict[str, Any]:
    """The hints of what the machine measured, as file and as rows."""
    path = tmp_path / "hints" / shipped.file_of(record.device_name())
    hints.hints(Settings(cache_dir=str(machine.store())), str(path))
    shipped._rows.cache_clear()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rewritten(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "hints" / shipped.file_of(record.device_name())
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    shipped._rows.cache_clear()


def first(new: New, tmp_path: Path, **fields: Any) -> tuple[Machine, Config]:
    """A machine that has searched, whose hints are shipped; the tile that won there is not the one that is tried
    first."""
    best = legality.candidates(region_of(), SIZE)[1]
    machine = new("first", best=best, **fields)
    compiled()
    write(machine, tmp_path)
    assert machine.tilings() == [(str(best), False)] and len(machine.built) > 1
    return machine, best


def test_a_hint_spares_the_search(new: New, tmp_path: Path) -> None:
    """One kernel is compiled, one timing taken, and no program for the other side is made; a second process finds what
    the first has kept."""
    _, best = first(new, tmp_path)
    machine = new("second")
    ran = compiled()
    close(ran.output, silu(X, T))
    assert ran.regions == [1] and [job.config for job in machine.built] == [best]
    assert (machine.checked, machine.searched, machine.programs) == (1, 0, 0)
    assert machine.tilings() == [(str(best), True)]
    (row,) = ran.reports[0].timings
    assert row["hinted"] and (row["ms"], row["baseline_ms"]) == (1.1, 2.2) and "busy_ms" not in row
    assert compiled().regions == [1] and machine.checked == 1 and len(machine.built) == 1


def test_hints_can_be_switched_off(new: New, tmp_path: Path) -> None:
    first(new, tmp_path)
    machine = new("second")
    compiled(options={"hints": False})
    assert machine.programs == 1 and machine.searched == 2 and len(machine.built) > 1


@pytest.mark.parametrize("groups", [True, False])
def test_without_hints_what_they_spared_is_searched(new: New, tmp_path: Path, groups: bool) -> None:
    """Once: then its records stand, also for who has hints. A tile alone was timed as any, and is no better."""
    _, best = first(new, tmp_path)
    rewritten(tmp_path, lambda found: None if groups else found.update(groups={}))
    machine = new("second", best=worst(best))
    compiled()
    assert machine.tilings() == [(str(best), True)] and all(r["hinted"] for r in machine.records())
    machine.searched = 0
    assert compiled(options={"hints": False}).regions == [1]
    assert machine.searched == 2 and machine.tilings() == [(str(worst(best)), False)]
    assert not any("hinted" in r for r in machine.records())
    for hints_on in (False, True):
        compiled(options={"hints": hints_on})
    assert machine.searched == 2 and machine.tilings() == [(str(worst(best)), False)]


def test_graphs_that_torch_keeps_are_of_their_hints(new: New, tmp_path: Path) -> None:
    """Only where tuning starts from them."""
    first(new, tmp_path)
    asked, off, untuned = Settings(), Settings(hints=False), Settings(tune="off")
    before = [JointPass(chosen).uuid() for chosen in (asked, off, untuned)]
    shipped.digest.cache_clear()
    rewritten(tmp_path, lambda found: found.update(groups={}))
    after = [JointPass(chosen).uuid() for chosen in (asked, off, untuned)]
    shipped.digest.cache_clear()
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True]
    assert asked.key() != off.key() and untuned.key() == Settings(hints=False, tune="off").key()


def test_a_tile_that_the_search_would_not_time_is_no_hint(new: New, tmp_path: Path) -> None:
    """One that is illegal, one that is for fewer tokens, and what is none."""
    _, best = first(new, tmp_path)
    region = only_region(tmp_path)
    tiles: tuple[Any, ...] = ("64x64co1x1", "128x128pp1x2 128x128pp2x1", "fast", "", 3, None, {}, "256x256co1x1")
    for tile in tiles:
        made = {region: {"buckets": {str(SIZE): {"tile": tile, "share": 1.1}}}}
        rewritten(tmp_path, lambda found, made=made: found.update(regions=made))  # type: ignore[misc]
        assert shipped.hints("none").tile(region_of(), SIZE) is None
    machine = new("second", best=best)
    assert compiled().regions == [1]
    assert machine.tilings() == [(str(best), False)] and len(machine.built) > 1


def only_region(tmp_path: Path) -> str:
    (name,) = json.loads((tmp_path / "hints" / "none.json").read_text())["regions"]
    return str(name)


@pytest.mark.parametrize("share", [1.3, 0.9, 2.0, None])
def test_a_tile_that_fares_otherwise_costs_a_search(new: New, tmp_path: Path, share: float | None) -> None:
    """One that is slower than the hint says, or faster: then cuBLAS may be another."""
    _, best = first(new, tmp_path)

    def change(found: dict[str, Any]) -> None:
        for row in found["regions"].values():
            row["buckets"] = {str(SIZE): {"tile": str(worst(best)), "share": share and 1.1}}

    rewritten(tmp_path, change)
    machine = new("second", best=best, beside=[share or 1.1, 1.0], turns=[1.0, 2.0] if share else [3.0, 2.0])
    ran = compiled()
    close(ran.output, silu(X, T))
    assert (machine.checked, machine.searched) == ((1, 2) if share else (0, 3))
    assert machine.tilings() == [(str(best), False)] and not any("hinted" in r for r in machine.records())
    assert machine.built[0].config == worst(best) and {j.config for j in machine.built} == set(
        legality.candidates(region_of(), SIZE)
    )


def worst(best: Config) -> Config:
    return next(c for c in reversed(legality.candidates(region_of(), SIZE)) if c != best)


def test_a_tile_whose_kernel_is_wrong_is_not_taken(new: New, tmp_path: Path) -> None:
    _, best = first(new, tmp_path)
    other = worst(best)

    class WrongThere(Interpreted):
        def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
            if self.config == best:
                return
            super().__call__(inputs, outs)

    machine = new("second", WrongThere, best=other)
    ran = compiled()
    close(ran.output, silu(X, T))
    assert machine.searched == 2 and (str(best), True) not in machine.tilings() and ran.regions == [1]


def test_a_tile_that_cannot_be_compiled_costs_a_search(new: New, tmp_path: Path) -> None:
    _, best = first(new, tmp_path)

    class NoneThere(Interpreted):
        def __init__(self, region: Region, config: Config, directory: Path, **how: Any) -> None:
            if config == best:
                raise Unsupported("no kernel")
            super().__init__(region, config, directory, **how)

    machine = new("second", NoneThere)
    assert compiled().regions == [1] and machine.checked == 0 and machine.searched == 2


def test_a_file_that_cannot_be_read_costs_a_search(new: New, tmp_path: Path) -> None:
    first(new, tmp_path)
    (tmp_path / "hints" / "none.json").write_text("{")
    machine = new("second")
    assert compiled().regions == [1] and machine.programs == 1 and machine.searched == 2


def test_a_loser_is_left_after_one_timing(new: New, tmp_path: Path) -> None:
    first(new, tmp_path, turns=[2.0, 1.0])
    machine = new("second", turns=[1.0, 2.0])
    ran = compiled()
    assert ran.regions == [0] and (machine.checked, machine.searched, len(machine.built)) == (1, 0, 1)
    assert "measured slower on another such card: 2.00 of Inductor's time" in ran.reports[0].refused[0].reason


@pytest.mark.parametrize(
    ("beside", "lost"), [([0.9, 1.0], [2.0, 1.0]), ([1.4, 1.0], [2.0, 1.0]), ([0.97, 1.0], [1.0, 0.96])]
)
def test_who_is_said_to_lose_and_fares_otherwise_is_searched(
    new: New, tmp_path: Path, beside: list[float], lost: list[float]
) -> None:
    """Also who is far slower still: another tile may be better. And who lost so narrowly that it would win here."""
    first(new, tmp_path, turns=lost)
    machine = new("second", beside=beside)
    assert compiled().regions == [1]
    assert (machine.checked, machine.searched) == (1, 2)


def test_a_tile_alone_is_timed_as_any(new: New, tmp_path: Path) -> None:
    """Where groups of the same Regions disagreed, their Regions' tiles are hints still."""
    _, best = first(new, tmp_path)
    rewritten(tmp_path, lambda found: found.update(groups={}))
    machine = new("second")
    assert compiled().regions == [1] and (machine.checked, machine.searched) == (0, 1)
    assert machine.tilings() == [(str(best), True)]


@pytest.mark.parametrize("stands", [True, False, None])
def test_a_law_that_stood_is_not_compared_again(
    new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands: bool | None
) -> None:
    """A narrow winner: without a hint, or with one that it fell, the program without its law is derived and timed."""
    model, x, asked = half(torch.bfloat16), streams(torch.bfloat16), list[int]()

    def noting(name: str, what: int) -> None:
        whole = getattr(Tuner, name)

        def noted(*given: Any) -> Any:
            asked.append(what)
            return whole(*given)

        monkeypatch.setattr(Tuner, name, noted)

    noting("better_undeferred", 1)
    noting("foresee", 2)
    machine = new("first", turns=[1.0, 1.1])
    compiled(model, *x)
    assert sorted(set(asked)) == [1, 2]
    found = write(machine, tmp_path)
    assert any("stands" in b for row in found["groups"].values() for b in row["buckets"].values())

    def change(found: dict[str, Any]) -> None:
        for row in found["groups"].values():
            for fared in row["buckets"].values():
                fared.pop("stands", None)
                fared |= {} if stands is None else {"stands": stands}

    rewritten(tmp_path, change)
    asked.clear()
    machine = new("second", turns=[1.0, 1.1])
    assert compiled(model, *x).regions == [3]
    assert sorted(set(asked)) == ([] if stands else [1, 2])
    assert machine.checked >= 2


@pytest.mark.parametrize("shipped_too", [True, False])
def test_a_law_that_fell_falls_as_it_is_said(
    new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped_too: bool
) -> None:
    """And is compared, in bursts, where nothing is said."""
    model, x = half(torch.bfloat16), streams(torch.bfloat16)
    against = Measurements.against
    machine = new("first", turns=[1.0, 1.1])
    taken = list[int]()

    def told(self: Measurements, *args: Any) -> outcome.Outcome:
        machine.turns, before = [1.05, 1.0], machine.searched
        try:
            return against(self, *args)
        finally:
            machine.turns = [1.0, 1.1]
            taken.append(machine.searched - before)

    monkeypatch.setattr(Measurements, "against", told)
    ran = compiled(model, *x)
    found = write(machine, tmp_path)
    assert [b["ratio"] for row in found["laws"].values() for b in row["buckets"].values()] == [0.9524]
    said = [b["stands"] for row in found["groups"].values() for b in row["buckets"].values() if "stands" in b]
    assert said == [False] and taken[0] == 1
    taken.clear()
    rewritten(tmp_path, lambda found: None if shipped_too else found.update(laws={}))
    machine = new("second", turns=[1.0, 1.1])
    again = compiled(model, *x)
    assert taken[0] == (0 if shipped_too else 1)
    assert [s.region for s in again.reports[0].sites] == [s.region for s in ran.reports[0].sites]


def test_only_what_this_machine_measured_by_search_is_written(new: New, tmp_path: Path, monkeypatch: Any) -> None:
    machine, _ = first(new, tmp_path)
    second = new("second")
    compiled()
    with pytest.raises(Unsupported, match="nothing was measured"):  # by a hint, all of it
        hints.hints(Settings(cache_dir=str(second.store())), str(tmp_path / "out.json"))
    monkeypatch.setattr(record, "device_name", lambda: "another")
    with pytest.raises(Unsupported, match="nothing was measured"):
        hints.hints(Settings(cache_dir=str(machine.store())), str(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_rows_of_several_stores_meet_in_one_file(new: New, tmp_path: Path) -> None:
    first(new, tmp_path)
    wide = torch.randn(128, 64, dtype=torch.bfloat16)
    machine = new("third")
    compiled(lambda x, t: F.silu(F.linear(x, wide)) * t[:, None], X, T, options={"hints": False})
    found = write(machine, tmp_path)
    assert [len(found[kind]) for kind in ("regions", "groups", "laws")] == [2, 2, 0]
