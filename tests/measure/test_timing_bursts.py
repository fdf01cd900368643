"""Bursts: short enough for the clocks to hold, and tried again where they do not."""

from __future__ import annotations

from functools import partial

import pytest
from fake_stream import Stream
from fake_stream import stream as stream

from coda_inductor.measure import timing


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
