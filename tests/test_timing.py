"""What the timing makes of a GPU: a stream of fake events, whose calls take the times that they say."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import random_inputs, token_scale
from compiling import Interpreted, pretend
from torch import Tensor

from coda_inductor.codegen import legality
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels import launch
from coda_inductor.measure import timing, tune
from coda_inductor.measure.timing import Times
from coda_inductor.tuning.outcome import Outcome


class Stream:
    """A GPU that runs a call as soon as it is launched. `power` slows all down while it is above 1: each launch lowers
    or raises the clock towards what the last ones drew, as a GPU's limit does."""

    def __init__(self) -> None:
        self.now_ms, self.host_s, self.heat = 0.0, 0.0, 0.0
        self.awaited = True
        self.launched = list[str]()

    def call(self, name: str, ms: float, *, power: float = 1.0, launch_s: float = 1e-6) -> Callable[[], None]:
        """A call of `ms` at full clock."""

        def run() -> None:
            self.launched.append(name)
            self.host_s += launch_s
            share = min(1.0, ms / 10)
            self.heat += share * (power - self.heat)
            self.now_ms += ms * max(1.0, self.heat)

        return run


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """In place of the current one; its company draws 1.0 and takes 0.02 ms."""
    made = Stream()

    class Event:
        def __init__(self, **_: object) -> None:
            self.at = math.nan

        def record(self) -> None:
            self.at, made.awaited = made.now_ms, False

        def elapsed_time(self, later: Event) -> float:
            assert made.awaited
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(made, "awaited", True))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def rest(seconds: float) -> None:
        made.host_s += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: made.host_s, sleep=rest)
    monkeypatch.setattr("coda_inductor.measure.timing.time", clock)
    monkeypatch.setattr(timing, "company_on", lambda device: made.call("company", 0.02))
    return made


def test_a_call_that_draws_little_takes_its_own_time(stream: Stream) -> None:
    calls = [stream.call("a", 0.5), stream.call("b", 0.7, power=0.8)]
    (a, b) = timing.compared(calls, 5)
    assert a == pytest.approx((0.5, 0.5)) and b == pytest.approx((0.7, 0.7))
    assert Times(1.0, 2.0).mean == 1.5


def test_what_draws_more_pays_for_those_beside_it(stream: Stream) -> None:
    """By turns it slows the other as much as itself; in a busy GPU it is charged with what it does to all."""
    quick, cool = timing.compared([stream.call("quick", 0.50, power=1.4), stream.call("cool", 0.52)], 25)
    assert quick.turns < cool.turns
    assert quick.busy - cool.busy == pytest.approx(0.7 - 0.52, rel=0.05)


def test_company_is_as_much_work_as_the_fastest(stream: Stream) -> None:
    timing.compared([stream.call("a", 0.4), stream.call("b", 0.9)], 5)
    launched = "".join("." if name == "company" else name for name in stream.launched)
    for name in "ab":
        assert min(map(len, re.findall(rf"(?<={name})\.+(?={name})", launched))) == 20


def test_the_much_slower_are_not_timed_on(stream: Stream) -> None:
    calls = [stream.call("a", 0.50), stream.call("b", 0.56), stream.call("c", 0.60)]
    assert [t.busy for t in timing.compared(calls, 5, slack=1.15)] == pytest.approx([0.50, 0.56, math.inf])


def test_what_the_turns_decide_is_not_timed_on(stream: Stream) -> None:
    calls = [stream.call("a", 0.50), stream.call("b", 0.505)]
    asked = list[Sequence[float]]()

    def decided(turns: Sequence[float]) -> bool:
        asked.append(turns)
        return len(asked) == 1

    assert timing.compared(calls, 5, decided=decided) == [pytest.approx((ms, math.inf)) for ms in (0.50, 0.505)]
    assert stream.launched.count("a") == 1 + 3 + 3 + 5 and "company" not in stream.launched
    assert timing.compared(calls, 5, decided=decided) == [pytest.approx((ms, ms)) for ms in (0.50, 0.505)]
    assert asked == [pytest.approx([0.50, 0.505])] * 2


def test_a_host_that_falls_behind_has_more_company_or_is_not_timed(stream: Stream) -> None:
    """0.5 ms on the GPU take 1 ms to launch: beside 40 products of the company the host keeps up, beside 25 not."""
    calls = [stream.call("a", 0.5, launch_s=1e-3), stream.call("b", 0.7)]
    timing.compared(calls, 5)
    launched = "".join("." if name == "company" else name for name in stream.launched)
    assert min(map(len, re.findall(r"(?<=a)\.+(?=a)", launched))) == 40
    del stream.launched[:]
    calls = [stream.call("a", 0.5, launch_s=2e-3), stream.call("b", 0.7)]  # 107: more than three times its work
    assert timing.compared(calls, 5) == [pytest.approx((0.5, 0.5)), pytest.approx((0.7, 0.7))]
    assert stream.launched.count("a") == 1 + 3 + 3 + 5  # and no burst


def test_long_calls_are_their_own_company(stream: Stream) -> None:
    """Each under its own load, there and back; several times, unless the order is all that is asked for."""
    assert timing.PASSES > 1 and timing.STEADY_MS >= 1000
    for ratios, passes in ((True, timing.PASSES), (False, 1)):
        calls = [stream.call("a", 8.0), stream.call("b", 8.3)]
        del stream.launched[:]
        a, b = timing.compared(calls, 5, ratios=ratios)
        assert a == pytest.approx((8.0, 8.0)) and b == pytest.approx((8.3, 8.3))
        before = 2 * (4 + 3)  # launches that are timed on the host, and by turns
        there = "a" * (300 // 8 + 100 // 8) + "b" * (int(300 / 8.3) + int(100 / 8.3))
        assert "".join(stream.launched[before:]) == "b" * math.ceil(1200 / 8.3) + (there + there[::-1]) * passes
        assert stream.host_s < timing.PAUSE_S  # nothing rests


def test_long_calls_that_lie_apart_need_one_pass(stream: Stream) -> None:
    """Of the means of there and back, one clear of the other."""
    for ms, passes in ((8.39, 3), (8.41, 1)):
        calls = [stream.call("b", ms), stream.call("a", 8.0)]
        del stream.launched[:]
        assert timing.steady(calls, [ms, 8.0], 3) == pytest.approx([ms, 8.0])
        assert stream.launched.count("a") == 1200 // 8 + 2 * passes * (300 // 8 + 100 // 8)
    assert timing.apart([[2.0, 2.01], [1.0, 1.1], [1.2, 1.5]]) and not timing.apart([[2.0, 1.0], [1.1, 1.3]])
    assert not timing.apart([[8.0, 8.0]])  # nothing to be apart from


def test_long_calls_are_timed_at_their_own_clocks(stream: Stream) -> None:
    stream.call("heats", 20.0, power=2.0)()
    calls = [stream.call("a", 8.0), stream.call("b", 10.0, power=1.25)]
    assert timing.compared(calls, 5)[0] == pytest.approx((8.0, 8.0), rel=1e-3)
    assert timing.compared(calls, 5)[1] == pytest.approx((12.5, 12.5))


@pytest.mark.parametrize(("ms", "launch_s", "lasting"), [(8.0, 1e-6, True), (7.99, 1e-6, False), (8.0, 7e-3, False)])
def test_which_calls_are_long(stream: Stream, ms: float, launch_s: float, lasting: bool) -> None:
    """All of 8 ms and more, that the host launches in 0.8 of that: else company is asked for."""
    timing.compared([stream.call("a", ms, launch_s=launch_s), stream.call("b", 30.0)], 5)
    assert ("company" not in stream.launched) is lasting


def test_a_host_that_stalls_once_makes_no_call_long(stream: Stream) -> None:
    begun = [0]

    def stalls() -> None:
        begun[0] += 1
        stream.now_ms += 9.0 if begun[0] == 4 + 1 else 0.5  # in the first of its turns

    timing.compared([stalls], 5)
    assert "company" in stream.launched


def test_what_long_turns_decide(stream: Stream) -> None:
    """Only calls that lie 1.25 apart: what turns say of long calls is rough."""
    calls = [stream.call("a", 10.0), stream.call("b", 12.6), stream.call("c", 12.4)]
    assert timing.compared(calls, 5, slack=1.08) == [pytest.approx((ms, busy)) for ms, busy in (
        (10.0, 10.0), (12.6, math.inf), (12.4, 12.4)
    )]  # fmt: skip
    assert timing.compared(calls, 5)[1] == pytest.approx((12.6, 12.6))
    for ms, decides in ((12.6, True), (12.4, False)):
        found = timing.compared([calls[0], stream.call("d", ms)], 5, decided=lambda turns: True)
        assert found == [
            pytest.approx((10.0, math.inf if decides else 10.0)),
            pytest.approx((ms, math.inf if decides else ms)),
        ]
    assert timing.compared(calls[:2], 5, decided=lambda turns: False)[1] == pytest.approx((12.6, 12.6))


def test_calls_longer_than_a_share_settle_once(stream: Stream) -> None:
    calls = [stream.call("a", 450.0), stream.call("b", 700.0)]
    assert timing.steady(calls, [450.0, 700.0], 1) == pytest.approx([450.0, 700.0])
    assert "".join(stream.launched) == "bb" + "aabb" + "bbaa"  # 1.4 s first: not less than 1.2


def test_loads_that_sink_evenly_hit_all_alike(stream: Stream) -> None:
    def call() -> None:
        stream.now_ms += 10.0 + 1e-4 * stream.now_ms

    first, second = timing.steady([call] * 2, [10.0] * 2, 3)
    assert second == pytest.approx(first, rel=1e-3)


def test_a_foreign_load_in_one_pass_does_not_count(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coda_inductor.timing")
    calls = [stream.call("a", 10.0), stream.call("b", 10.0)]

    def disturbed() -> None:
        calls[0]()
        stream.now_ms += 5.0 if 80 < stream.launched.count("a") <= 160 else 0.0  # the second pass

    assert timing.steady([disturbed, calls[1]], [10.0] * 2, 3) == pytest.approx([10.0, 10.0])
    assert [r.getMessage() for r in caplog.records] == [
        "the load did not hold: in 3 passes a call's times differ by 50.0 %"
    ]
    timing.steady(calls, [10.0] * 2, 3)
    assert len(caplog.records) == 1


def test_how_much_company() -> None:
    """Of 0.05 ms, which the host launches in 0.01."""
    for calls, wanted in (
        ([(0.1, 0.5), (0.2, 0.55)], 10),
        ([(0.1, 0.5), (0.6, 0.55)], 10),  # 0.16 ms behind: six of it make up for that
        ([(0.1, 0.5), (0.8, 0.55)], 12),
        ([(0.1, 0.5), (1.5, 0.55)], None),  # 1.06 ms behind: 36 of it, 1.8 ms
        ([(0.01, 0.02)], 1),
        ([(0.1, 0.02)], 3),
        ([(0.2, 0.02)], None),
    ):
        assert timing.company_for(calls, 0.01, 0.05) == wanted, calls
    assert timing.company_for([(0.1, 0.5)], 0.045, 0.05) is None  # itself more than the host can launch


def test_what_is_not_timed_in_company_needs_none(stream: Stream) -> None:
    calls = [stream.call("a", 0.5, power=1.2), stream.call("b", 1.0, launch_s=1e-2)]
    a, b = timing.compared(calls, 5, slack=1.15)
    assert a.busy != a.turns and b.busy == math.inf


def test_a_burst_is_over_before_the_clocks_fall(stream: Stream) -> None:
    """0.7 s in all: 200 ms of the last call, then two shares of 50 ms for each."""
    times = {"a": 2.0, "b": 10.0, "c": 5.0, "d": 1.0, "e": 10.0}
    calls = [stream.call(name, ms) for name, ms in times.items()]
    assert timing.repeated(calls, [*times.values()]) == pytest.approx([*times.values()])
    assert (
        "".join(stream.launched)
        == "e" * 20 + (there := "a" * 25 + "b" * 5 + "c" * 10 + "d" * 50 + "e" * 5) + there[::-1]
    )
    assert stream.now_ms == pytest.approx(700) and stream.host_s == pytest.approx(timing.PAUSE_S, abs=1e-3)


def test_long_calls_run_once_in_each_share(stream: Stream) -> None:
    calls = [stream.call("a", 120.0), stream.call("b", 200.0)]
    assert timing.repeated(calls, [120.0, 200.0]) == pytest.approx([120.0, 200.0])
    assert "".join(stream.launched) == "b" + "abba"
    drifting = lambda: setattr(stream, "now_ms", 2 * stream.now_ms + 400)  # noqa: E731
    timing.repeated([drifting], [400.0])
    assert stream.host_s == pytest.approx(2 * timing.PAUSE_S, abs=1e-3)  # it cannot hold, and is not tried again


@pytest.mark.parametrize("begins", range(0, 700, 20))
@pytest.mark.parametrize("factor", [1.18, 0.85])
def test_clocks_that_change_in_a_burst_are_seen(stream: Stream, begins: int, factor: float) -> None:
    """By 18 % for 0.2 s, wherever in the first burst: it is repeated after a rest, or nobody was measured then."""
    times = {"a": 2.0, "b": 2.06, "c": 0.95}

    def call(ms: float) -> None:
        stream.now_ms += ms * (factor if begins <= stream.now_ms < begins + 200 else 1.0)

    found = timing.repeated([partial(call, ms) for ms in times.values()], [*times.values()])
    assert found == pytest.approx([*times.values()], rel=0.016)  # half of what a call may differ from itself
    assert stream.host_s < timing.PAUSE_S + 2.1 * timing.REST_S  # the second may begin in it, too


def test_a_last_call_that_may_be_off(stream: Stream) -> None:
    """Its rise tells nothing then; its two times do."""
    rising = lambda: setattr(stream, "now_ms", stream.now_ms + (10.0 if stream.now_ms < 200 else 11.0))  # noqa: E731
    for last, tries in ((False, 1), (True, 2)):
        stream.now_ms = stream.host_s = 0.0
        assert timing.repeated([stream.call("a", 10.0), rising], [10.0] * 2, last=last)[0] == pytest.approx(10.0)
        assert stream.host_s == pytest.approx(timing.PAUSE_S + (tries - 1) * timing.REST_S, abs=1e-3)


@pytest.mark.parametrize("ratios", [False, True])
def test_what_is_taken_from_all_may_be_off_where_the_order_is_asked_for(stream: Stream, ratios: bool) -> None:
    """The company is slower in the burst than in its rise: the burst is tried again only for the sake of ratios."""
    first, company, launched = stream.call("a", 0.5), stream.call("company", 0.02), [0]

    def counted() -> None:
        first()
        launched[0] += 1

    calls = [counted, stream.call("b", 0.7)]

    def slower() -> None:
        company()
        stream.now_ms += 0.002 if launched[0] > 12 else 0.0  # from the burst's first share on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "company_on", lambda device: slower)
        timing.compared(calls, 5, ratios=ratios)
    assert (stream.host_s > timing.PAUSE_S + timing.REST_S) is ratios


def test_a_rise_may_take_most_of_its_time(stream: Stream) -> None:
    """Only its end is compared: clocks that hold after 0.1 s are no reason to try again."""

    def rising() -> None:
        stream.now_ms += 8.0 if stream.now_ms < 100 else 10.0

    timing.repeated([stream.call("a", 10.0), rising], [10.0] * 2)
    assert stream.host_s == pytest.approx(timing.PAUSE_S, abs=1e-3)


def test_clocks_that_sink_evenly_hit_all_alike(stream: Stream) -> None:
    def call() -> None:
        stream.now_ms += 1.0 + 2e-5 * stream.now_ms

    first, *others = timing.repeated([call] * 6, [1.0] * 6)
    assert others == pytest.approx([first] * 5, rel=1e-3)


def test_of_bursts_that_do_not_hold_the_best_counts(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coda_inductor.timing")
    launched, of_a_burst, slower = [0], 20 + 4 * 12, (1.4, 1.1, 1.3)

    def run() -> None:
        burst, place = divmod(launched[0], of_a_burst)
        launched[0] += 1
        stream.now_ms += 10.0 * (slower[burst] if place >= 44 else 1.0)

    assert timing.repeated([run, run], [10.0] * 2) == pytest.approx([10.5, 10.5])
    assert launched == [3 * of_a_burst] and stream.host_s == pytest.approx(timing.PAUSE_S + 2 * timing.REST_S)
    said = ["the clocks did not hold: a call's times differ by 10.0 %, 3 tried"]
    assert [r.getMessage() for r in caplog.records] == said


def test_a_tile_without_a_rival_is_timed_no_further(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By turns alone; with one there is a burst for both."""
    pretend(monkeypatch, tmp_path)
    region = token_scale(64, 64)
    inputs = random_inputs(region, 300, "cpu")
    for ratio, rivals in ((1.05, 1), (1.03, 2)):

        def rated(calls: Sequence[Callable[[], object]], rounds: int, ratio: float = ratio, **how: Any) -> list[Times]:
            assert how["level"] == 0.06 and how["slack"] == 1.04 and not how["ratios"]
            turns = [1.0, ratio, *([2.0] * (len(calls) - 2))]
            busy = how["decided"](turns)
            return [Times(ms, math.inf if busy or ms > how["slack"] else ms) for ms in turns]

        with monkeypatch.context() as patch:
            patch.setattr(timing, "compared", rated)
            rows = tune.tune(region, inputs, str(tmp_path / str(rivals))).rows
        assert [("ms" in row, "busy_ms" in row) for row in rows[:3]] == [
            (True, rivals > 1), (rivals > 1, rivals > 1), (False, False)
        ]  # fmt: skip


def test_what_runs_beside_tiles_is_timed_where_none_is_right(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, Wrong)
    region, asked = token_scale(64, 64), list[bool]()

    def compared(calls: Sequence[Callable[[], object]], rounds: int, **how: Any) -> list[Times]:
        asked.append(how["decided"]([1.0]) or not how["ratios"])
        return [Times(1.0, 1.0)] * len(calls)

    monkeypatch.setattr(timing, "compared", compared)
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    config = legality.candidates(region, 8192)[0]
    (row,) = tune.measure(kernel, random_inputs(region, 300, "cpu"), [config], beside=[lambda: None])
    assert asked == [False] and "why" in row and row["beside"] == [1.0]


def test_a_company_that_the_host_cannot_launch_is_none(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "company_on", lambda device: stream.call("company", 0.02, launch_s=3e-5))
    assert timing.compared([stream.call("a", 0.5, power=1.4)], 5) == [Times(0.5, 0.5)]


class Spilled(Interpreted):
    """A kernel that is right and spills much."""

    stack = 512


class Wrong(Interpreted):
    """A kernel that leaves its outputs as they were."""

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        pass


def test_tuning_where_no_tile_qualifies(stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All spill: the least is taken. None is right: the Region is not supported."""
    region, compared = token_scale(64, 64), timing.compared
    inputs = random_inputs(region, 300, "cpu")
    for build in (Spilled, Wrong):
        with monkeypatch.context() as patch:
            pretend(patch, tmp_path / build.__name__, build)
            patch.setattr(timing, "compared", compared)
            patch.setattr(timing, "BURST_MS", 201)  # these kernels take none of its time
            store = str(tmp_path / f"{build.__name__}-store")
            if build is Spilled:
                rows = tune.tune(region, inputs, store).rows
                assert ["ms" in row for row in rows] == [True] + [False] * (len(rows) - 1)
            else:
                with pytest.raises(Unsupported, match=r"no configuration .* is right"):
                    tune.tune(region, inputs, store)


def test_a_winner_by_turns_must_cost_nothing_in_a_busy_gpu() -> None:
    def outcome(*ms: float) -> Outcome:
        return Outcome(1, Times(*ms[:2]), Times(*ms[2:]))

    assert outcome(1.0, 1.0, 1.03, 1.0).loses == "" and Outcome(1).loses == ""
    assert outcome(1.0, 1.0, 1.01, 1.2).loses == "measured hardly faster: 1000 us fused, 1010 us by Inductor"
    assert (
        outcome(1.0, math.inf, 1.0199, math.inf).loses == "measured hardly faster: 1000 us fused, 1020 us by Inductor"
    )
    assert outcome(1.1, 1.1, 1.0, 1.2).loses == "measured slower: 1100 us fused, 1000 us by Inductor"
    assert outcome(1.0, 1.1, 1.2, 1.08).loses == "measured slower in a busy GPU: 1100 us fused, 1080 us by Inductor"
    costs = [[outcome(1.0, busy, 1.0, 1.0).costs(margin) for margin in (0.0, 0.01)] for busy in (0.99, 1.019, 1.021)]
    assert costs == [[False, False], [True, False], [True, True]]  # of the mean
    assert outcome(1.0, 2.0, 1.2, 2.2).ratio == pytest.approx(1.1)  # narrow: a law is compared with its absence
    assert outcome(1.0, 0.0, 1.2, 0.1).ratio == pytest.approx(1.2) and Outcome(1).ratio == math.inf
