"""Regions on torch in blocks of rows: the same numbers, in memory that does not grow with M."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from codegen_cases import (
    CASES,
    blank_outputs,
    norm_gradients,
    random_inputs,
    random_region,
    relative_error,
    sample_gate,
    sample_swiglu,
    scores,
    summed,
    turned_left,
    weighted_sums,
)
from live_bytes import Live
from torch import Tensor

from coda_inductor.core import blocks, errors
from coda_inductor.core.errors import CodaWarning
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.kernels import launch

REGIONS: list[Callable[[int, int], Region]] = [*CASES, *(lambda n, k, s=s: random_region(s) for s in range(20))]
REGIONS += [partial(sample_gate, tokens=5), partial(sample_swiglu, tokens=5)]  # of several samples


def whole(region: Region, inputs: Sequence[Tensor], m: int) -> list[Tensor]:
    """Outputs with what `into` leaves there, M rows at once."""
    outs = blank_outputs(region, m, "cpu")
    blocks.into(region, inputs, outs, 1 << 30)
    return outs


@pytest.mark.parametrize("make", REGIONS)
def test_one_block_is_the_interpreter(make: Callable[[int, int], Region]) -> None:
    region = make(72, 64)
    m = 37
    inputs = random_inputs(region, m, "cpu")
    for found, wanted in zip(whole(region, inputs, m), interpret(region, inputs), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("make", REGIONS)
@pytest.mark.parametrize("numbers", [1, 300, 1000])
def test_blocks_give_the_same(make: Callable[[int, int], Region], numbers: int) -> None:
    """Of one row, of a few (the last of fewer), and so many that a weight is widened by columns all the same."""
    region = make(72, 64)
    m = 37
    inputs, found = random_inputs(region, m, "cpu"), blank_outputs(region, m, "cpu")
    blocks.into(region, inputs, found, numbers)
    for out, wanted in zip(found, interpret(region, inputs), strict=True):
        assert relative_error(out, wanted) < (2e-6 if out.dtype == torch.float32 else 2e-4)


@pytest.mark.parametrize("make", [summed, turned_left, weighted_sums, norm_gradients])
def test_where_sums_are_exact_blocks_give_the_same_bits(make: Callable[[int, int], Region]) -> None:
    region = make(72, 64)
    inputs = [(x * 4).round().clamp(-8, 8) for x in random_inputs(region, 40, "cpu")]
    inputs[1:3] = [(x * 40).round().clamp(-8, 8) if i < region.matrices else x for i, x in enumerate(inputs[1:3], 1)]
    found = blank_outputs(region, 40, "cpu")
    blocks.into(region, inputs, found, 700)
    assert all(map(torch.equal, found, interpret(region, inputs)))


def test_what_nobody_reads_is_not_computed() -> None:
    region = scores(72, 64)
    inputs = random_inputs(region, 37, "cpu")
    outs = [None, None, torch.empty(37)]
    with Live() as live:
        blocks.into(region, inputs, outs)
    assert torch.equal(outs[2], interpret(region, inputs)[2])  # type: ignore[arg-type]
    with Live() as all_of_it:
        blocks.into(region, inputs, blank_outputs(region, 37, "cpu"))
    assert live.peak <= all_of_it.peak


def test_no_tokens() -> None:
    region = weighted_sums(72, 64)
    outs = [torch.ones(72), torch.ones(72), torch.ones(0)]
    blocks.into(region, random_inputs(region, 0, "cpu"), outs)
    assert not any(out.any() for out in outs)


NUMBERS = 1 << 16
VALUE = 4 * NUMBERS  # bytes


@pytest.mark.parametrize("make", [scores, norm_gradients, turned_left])
def test_the_fallback_of_a_launch_takes_no_more_for_more_tokens(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], Region]
) -> None:
    """An LM head, in small: 8192 columns, of which one value of 256 tokens is 32 blocks."""
    monkeypatch.setattr(blocks, "NUMBERS", NUMBERS)
    region, peaks = make(8192, 64), list[int]()
    for m in (64, 256):
        inputs, outs = random_inputs(region, m, "cpu"), blank_outputs(region, m, "cpu")
        monkeypatch.setattr(errors, "said", set())
        with Live() as live, pytest.warns(CodaWarning, match="runs as separate operations"):
            launch.fall_back(region, inputs, outs, "a test says so")
        peaks.append(live.peak)
        for out, wanted in zip(outs, interpret(region, inputs), strict=True):
            assert relative_error(out, wanted) < 2e-4
    assert peaks[0] == peaks[1] <= 8 * VALUE
    assert 32 * VALUE == 256 * 8192 * 4


def test_the_interpreter_keeps_no_value_that_nothing_wants_any_more() -> None:
    """Of a chain, two values at a time and what leaves."""
    region, (m, n) = random_region(0), (64, 24)
    lets = tuple(
        replace(region.lets[0], name=f"x{i}", op="mul", args=(f"x{i - 1}" if i else "acc", 0.5)) for i in range(9)
    )
    chain = replace(scores(n, 16), lets=lets, stores=(replace(scores(n, 16).stores[0], value="x8"),), reductions=())
    inputs = random_inputs(chain, m, "cpu")
    with Live() as live:
        interpret(chain, inputs)
    assert live.peak <= 4 * m * n * 4
