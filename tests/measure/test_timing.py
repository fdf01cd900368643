"""Calls by turns and in a busy GPU: what company they have, and which are timed no further."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from fake_stream import Stream
from fake_stream import stream as stream

from coda_inductor.measure import timing
from coda_inductor.measure.timing import Times
from coda_inductor.tuning.outcome import Outcome


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


def test_a_company_that_the_host_cannot_launch_is_none(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "company_on", lambda device: stream.call("company", 0.02, launch_s=3e-5))
    assert timing.compared([stream.call("a", 0.5, power=1.4)], 5) == [Times(0.5, 0.5)]


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
