"""What looks like attention that is written out, and stays as it is; results and gradients are those of the graph."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import written_attention
from torch import Tensor
from written_attention import B, D, H, Layer, T, Written, Y, both, compared, fused, plain


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    written_attention.in_float64(monkeypatch)


def over_queries(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that add up to one for each key."""
    return (q @ k.mT).softmax(-2) @ v


def over_heads(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(1) @ v


def capped(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).tanh() * 5).softmax(-1) @ v


def bounded(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bound that few scores reach."""
    return (q @ k.mT).clamp(-50, 50).softmax(-1) @ v


def of_bounded_weights(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).clamp(1e-9) @ v


def of_temperature(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A scale that is learned."""
    return (q @ k.mT * a.size).softmax(-1) @ v


def negated(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.2).softmax(-1) @ v


def mixed(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads talk to each other."""
    return torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), a.table[:, 0, :H]) @ v  # type: ignore[index]


def sigmoid(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).sigmoid() @ v


def linear(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) / T @ v


def off_by_one(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that may be 0."""
    e = (q @ k.mT).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def twice_softmax(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).softmax(-1) @ v


def squared(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return (weights * weights) @ v


def above_mean(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is hidden depends on scores."""
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.mean(-1, keepdim=True), -math.inf).softmax(-1) @ v


def leaves_weights(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A number that hides little."""
    return (q @ k.mT).masked_fill(a.past == 0, -3.0).softmax(-1) @ v  # type: ignore[arg-type]


def sums_are_read(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)


def weights_are_read(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.square().sum(-1, keepdim=True)


def two_values(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + (weights @ v.sin()).cos()


def of_another_dtype(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of another dtype."""
    return (q @ k.mT + a.table.float()[None]).softmax(-1) @ v  # type: ignore[index]


def every_key_hidden(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In training, a row of which a number hides every key has no gradient here."""
    stays = torch.arange(T)[:, None] > torch.arange(T)
    return torch.where(stays, q @ k.mT, -1e30).softmax(-1) @ v


# ---- what a mask does to weights, and small numbers


def queries_hidden(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of weights that are 0."""
    return (q @ k.mT).softmax(-1).masked_fill(a.windows[:, None, :, :1] > 0, 0.0) @ v  # type: ignore[index]


def heads_hidden(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(a.table[:, :1, :1] > 0, 0.0, (q @ k.mT).softmax(-1)) @ v  # type: ignore[index]


def all_hidden(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one flag."""
    return (q @ k.mT).softmax(-1).masked_fill(a.size > 0, 0.0) @ v


def without_nan(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A row whose every key is hidden is 0."""
    hidden = a.windows[:, None] > 0.5  # type: ignore[index]
    hidden = hidden | (torch.arange(T)[:, None] == 3)
    weights = (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v


def hidden_twice(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As ESPnet and WeNet have it."""
    hidden = (a.windows[:, None] > 0.5) | (torch.arange(T)[:, None] == 3)  # type: ignore[index]
    return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


def low_twice(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = (a.windows[:, None] > 0.5) | (torch.arange(T)[:, None] == 3)  # type: ignore[index]
    return (q @ k.mT).masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0.0) @ v


def at_least(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A small number that is added to the sum of a row."""
    hidden = torch.arange(T)[:, None] <= torch.arange(T)
    e = (q @ k.mT).masked_fill(hidden, -math.inf).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-10)) @ v


def at_least_of_tensors(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp()
    return (e / (e.sum(-1, keepdim=True) + torch.full((), 1e-10, dtype=q.dtype))) @ v


def repeated_sums(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row's sum, times the number of keys."""
    e = (q @ k.mT).exp()
    return (e / e.sum(-1, keepdim=True).expand(e.shape).sum(-1, keepdim=True)) @ v


def of_eight_bits(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).to(torch.float8_e4m3fn).to(q.dtype) @ v


def beside_a_table(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the table holds only a run knows: the number may not absorb it."""
    return (q @ k.mT + a.table).masked_fill(a.past == 0, -1e9).softmax(-1) @ v  # type: ignore[operator, arg-type]


def two_products(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As DeepSeek writes it."""
    return ((q @ k.mT + q.sin() @ k.cos().mT) * 0.3).softmax(-1) @ v


def of_no_size(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.0).softmax(-1) @ v


def over_nothing(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) / 2.0 + 1.0) @ v


def undone(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is hidden is shown again."""
    hidden = torch.arange(T)[:, None] < torch.arange(T)
    return ((q @ k.mT).masked_fill(hidden, -1e30) + 1e30 * hidden.to(q.dtype)).softmax(-1) @ v


STAY: list[Written] = [
    over_queries, over_heads, capped, bounded, of_bounded_weights, of_temperature, negated, mixed, sigmoid, linear,
    off_by_one, twice_softmax, squared, above_mean, leaves_weights, sums_are_read, weights_are_read, two_values,
    of_another_dtype, queries_hidden, heads_hidden, all_hidden, without_nan, hidden_twice, low_twice, at_least,
    at_least_of_tensors, repeated_sums, of_eight_bits, two_products, of_no_size, over_nothing, undone, beside_a_table,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("attention", STAY, ids=lambda f: f.__name__)
def test_it_stays(attention: Written, mode: str) -> None:
    report, graph = compared(Layer(attention), mode)
    assert fused(graph) == 0 and report.grouped == ()


def learned(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No kernel that is faster has the gradient of a mask."""
    return (q @ k.mT + a.learned).softmax(-1) @ v


def dropped(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def once_more(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient of another function: values are hidden from it."""
    weights = (q @ k.mT).softmax(-1)
    return weights.detach() @ v + (weights - weights.detach()) @ v.sin()


def hidden_together(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each mask leaves each row a key, both leave the first none."""
    i = torch.arange(T)
    return (q @ k.mT).masked_fill(i[:, None] < i, -1e12).masked_fill(i[:, None] == i, -1e12).softmax(-1) @ v


def keys_as_rows(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is [keys, queries]: of the first query every key is hidden."""
    hidden = (torch.arange(T) == 0).expand(T, T)
    return (k @ q.mT).masked_fill(hidden, -1e30).transpose(-1, -2).softmax(-1) @ v


def straight_through(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are a softmax, their gradient is another one."""
    scores = q @ k.mT
    return (scores.softmax(-1).detach() + (scores - scores.detach()) * 0.1) @ v


def read_along_keys(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights are summed as the gradient of positions is."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    down = torch.bmm(q, a.learned[0, :D, :Y].expand(B * H, D, Y))
    weights = ((q @ k.mT).view(-1, T, Y, T // Y) + down[..., None]).view(-1, T, T).softmax(-1)
    return (weights @ v + weights.view(-1, T, Y, T // Y).sum(-1).sin()[..., :1]).view(B, H, T, D)


IN_TRAINING = [
    learned, every_key_hidden, once_more, hidden_together, keys_as_rows, straight_through, read_along_keys,
]  # fmt: skip


@pytest.mark.parametrize("attention", IN_TRAINING, ids=lambda f: f.__name__)
def test_it_stays_in_training(attention: Written) -> None:
    assert fused(compared(Layer(attention), "train")[1]) == 0


def only_values(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(a, q.detach(), k.detach(), v)


def test_gradients_of_values_alone() -> None:
    assert fused(compared(Layer(only_values), "train")[1]) == 0


class WithWeights(Layer):
    """The weights are a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        weights = (q @ k.mT).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_weights_that_are_returned(mode: str) -> None:
    assert fused(compared(WithWeights(plain), mode)[1]) == 0


class Overwritten(Layer):
    """The table is overwritten once it was read, as a mask or as values."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.table.mul_(0.5)  # type: ignore[operator]
        return made


def tabled(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + a.table).softmax(-1) @ v  # type: ignore[operator]


def test_memory_that_is_overwritten() -> None:
    assert fused(compared(Layer(tabled), "infer")[1]) == 1
    assert fused(compared(Overwritten(tabled), "infer")[1]) == 0


def held_values(a: Layer, q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ a.table[:, :, :D].expand(B, H, T, D)  # type: ignore[index]


def test_operands_that_are_overwritten() -> None:
    assert fused(compared(Layer(held_values), "infer")[1]) == 1
    assert fused(compared(Overwritten(held_values), "infer")[1]) == 0


def test_dropped_weights_stay() -> None:
    """What is drawn is not the same again, so no results are compared."""
    with torch.random.fork_rng():
        _, _, after = both(Layer(dropped), "train")
    assert fused(after) == 0
