"""Long calls: they are timed under a load of their own, there and back."""

from __future__ import annotations

import math

import pytest
from fake_stream import Stream
from fake_stream import stream as stream

from coda_inductor.measure import timing


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
