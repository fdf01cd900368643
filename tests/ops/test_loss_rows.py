"""What is left of a loss's rows (ops/loss.py), against torch's own softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coda_inductor.ops.loss import CAP, LOSS_ROWS, LOSS_ROWS_, LOSS_TARGETS


def given(rows: int, columns: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scores, x and the weight that make them, the targets, and what an epilogue stores of them."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 8, dtype=torch.float64), torch.randn(columns, 8, dtype=torch.float64) * spread
    target = torch.randint(0, columns, (rows, 1))
    scores = x @ weight.T
    stored = torch.exp((scores - scores.gather(1, target)).clamp(max=CAP)).scatter(1, target, 0.0)
    return scores, x, weight, target, stored, stored.sum(1, keepdim=True)


def product(given: tuple[Tensor, Tensor]) -> Tensor:
    gradient, part = given
    return gradient * part


def wanted(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the softmax less one at the target."""
    loss = -torch.log_softmax(scores, 1).gather(1, target)
    return loss, torch.softmax(scores, 1).scatter_add(1, target, -torch.ones_like(loss))


@pytest.mark.parametrize("spread", (0.1, 1.0, 15.0, 300.0))
def test_softmax_less_the_target(spread: float) -> None:
    """Some rows, or all, are far at the greatest spreads."""
    scores, x, weight, target, stored, total = given(40, 50, spread)
    gradient, loss, part = LOSS_ROWS(stored, total, target, None, x, weight, None, 1.0)
    exact, difference = wanted(scores, target)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part * gradient, difference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("biased", (False, True))
def test_of_a_multiple(biased: bool) -> None:
    _, x, weight, target, _, _ = given(40, 50, 30.0)
    bias = torch.randn(50, dtype=torch.float64) if biased else None
    scores = 0.5 * (x @ weight.T if bias is None else x @ weight.T + bias)
    stored = torch.exp((scores - scores.gather(1, target)).clamp(max=CAP)).scatter(1, target, 0.0)
    gradient, loss, part = LOSS_ROWS(stored, stored.sum(1, keepdim=True), target, None, x, weight, bias, 0.5)
    exact, difference = wanted(scores, target)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part * gradient, difference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", (0.1, 1.0, 15.0, 300.0))
def test_different_factors(spread: float) -> None:
    """Of the softmax and the one-hot, in far rows as well."""
    scores, x, weight, target, stored, total = given(40, 50, spread)
    gradient, loss, part = LOSS_ROWS(stored, total, target, None, x, weight, None, 1.0)
    _, difference = wanted(scores, target)
    rest, slope = torch.rand_like(total), torch.rand_like(total)
    rest[:8], rest[8:16], rest[16:24] = 0, 1, 2
    found = product(LOSS_TARGETS(gradient, part, loss, target, 1 - rest, rest, slope))
    there = slope * (difference.gather(1, target) + rest)
    torch.testing.assert_close(found, difference.scatter(1, target, there), rtol=1e-12, atol=1e-12)


def test_a_target_that_is_not_counted() -> None:
    """The softmax alone is left there, however small: no difference of what is rounded to E's dtype."""
    scores, x, weight, target, stored, total = given(40, 50, 5.0)
    rows = LOSS_ROWS(stored.bfloat16(), total.float(), target, None, x.float(), weight.float(), None, 1.0)
    gradient, loss, part = rows
    nothing = torch.zeros_like(loss)
    found = product(LOSS_TARGETS(gradient, part, loss, target, nothing, nothing + 1, None))
    exact = torch.softmax(scores, 1).gather(1, target).float()
    torch.testing.assert_close(found.gather(1, target), exact, rtol=5e-3, atol=0)


def test_a_target_that_is_nearly_sure() -> None:
    """Softmax less one is the total of the others, however small."""
    total, target = torch.tensor([[1e-9], [1e-3]]), torch.zeros(2, 1, dtype=torch.int64)
    stored = torch.cat([torch.zeros_like(total), total], 1)
    gradient, loss, part = LOSS_ROWS(stored, total, target, None, None, None, None, 1.0)
    one = torch.ones_like(total)
    found = product(LOSS_TARGETS(gradient, part, loss, target, one, 0 * one, None))
    torch.testing.assert_close(found[:, :1], -total / (1 + total), rtol=1e-5, atol=0)


def test_slopes() -> None:
    """They multiply the exponentials, and what is written at the target; the totals are without them."""
    scores, *_, target, stored, total = given(40, 50, 1.0)
    slopes = torch.rand(40, 50, dtype=torch.float64)
    gradient, loss, part = LOSS_ROWS(stored * slopes, total, target, slopes.gather(1, target), None, None, None, 1.0)
    exact, difference = wanted(scores, target)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part * gradient, slopes * difference, rtol=1e-12, atol=1e-12)


def test_what_is_rounded_at_the_target_goes_into_the_factor() -> None:
    """So the greatest number of a row is exact, and an untrained model's gradient nearly is."""
    scores, *_, target, stored, total = given(40, 5000, 0.1)
    gradient, _, part = LOSS_ROWS(stored.bfloat16(), total.float(), target, None, None, None, None, 1.0)
    _, difference = wanted(scores, target)
    found = part * gradient.float()
    torch.testing.assert_close(found.gather(1, target).double(), difference.gather(1, target), rtol=1e-6, atol=0)
    assert float((found - difference).norm() / difference.norm()) < 1e-4


def test_in_place() -> None:
    _, x, weight, target, stored, total = given(40, 50, 15.0)
    made = LOSS_ROWS(stored, total, target, None, x, weight, None, 1.0)
    loss, part = torch.full_like(total, torch.nan), torch.full_like(total, torch.nan)
    LOSS_ROWS_(stored, loss, part, total, target, None, x, weight, None, 1.0)
    assert all(torch.equal(a, b) for a, b in zip((stored, loss, part), made, strict=True))


def test_opcheck() -> None:
    _, x, weight, target, stored, total = given(4, 6, 1.0)
    torch.library.opcheck(LOSS_ROWS, (stored, total, target, None, x, weight, None, 1.0))


@pytest.mark.parametrize("kept", (1.0, 0.9, 0.3))
def test_what_is_rounded_again_at_the_target_goes_into_the_factor(kept: float) -> None:
    """Of smoothed labels the target still is the greatest of its row."""
    scores, *_, target, stored, total = given(40, 5000, 0.1)
    rows = LOSS_ROWS(stored.bfloat16(), total.float(), target, None, None, None, None, 1.0)
    gradient, loss, part = rows
    hot = torch.full_like(loss, kept)
    found = product(LOSS_TARGETS(gradient, part, loss, target, hot, 1 - hot, None))
    exact = torch.softmax(scores, 1).gather(1, target) - kept
    torch.testing.assert_close(found.gather(1, target).double(), exact, rtol=1e-6, atol=0)


def test_a_small_number_at_the_target_leaves_the_factor() -> None:
    """Where the softmax at the target is as great as k, the others are the row; they are as exact as they were."""
    total, target = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1, dtype=torch.int64)
    stored = torch.cat([torch.zeros_like(total), total], 1).bfloat16()
    gradient, loss, part = LOSS_ROWS(stored, total, target, None, None, None, None, 1.0)
    hot = torch.tensor([[0.493], [0.2571]])
    _, factor = LOSS_TARGETS(gradient, part, loss, target, hot, 1 - hot, None)
    torch.testing.assert_close(factor, part, rtol=0, atol=0)
