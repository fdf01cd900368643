"""Attention that is written out is one operation: the same in float64, forward and backward. Here by the definition of
attention; with cuDNN's kernels in tests/gpu/test_written_attention.py."""

from __future__ import annotations

import pytest
import torch
import written_attention
from image_attention import written as code_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from written_attention import (
    SPELLINGS,
    UNKNOWN,
    B,
    D,
    H,
    Layer,
    T,
    Written,
    Y,
    aten,
    both,
    compared,
    fused,
    image,
    image_of_sums,
    plain,
)

from coda_inductor.attention import features, written
from coda_inductor.attention.calls import EFFICIENT


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    written_attention.in_float64(monkeypatch)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_one_operation(spelling: str, mode: str) -> None:
    report, graph = compared(Layer(SPELLINGS[spelling], H // 2 if spelling == "grouped" else H), mode)
    assert fused(graph) == (2 if spelling == "twice" else 1)
    assert not [n for n in graph.nodes if n.target in (aten.bmm.default, aten.baddbmm.default, aten.exp.default)]
    assert report.grouped[0].what.startswith("products and a softmax")
    sizes = [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [s for s in sizes if s.numel() >= B * H * T * T]  # nothing is as large as the scores


@pytest.mark.parametrize("spelling", UNKNOWN)
def test_masks_that_only_a_run_knows(spelling: str) -> None:
    """In training a row whose every key a number hides has gradients of its own."""
    assert fused(compared(Layer(UNKNOWN[spelling]), "infer")[1]) == 1
    assert fused(compared(Layer(UNKNOWN[spelling]), "train")[1]) == 0


@pytest.mark.parametrize(("spelling", "hides"), [("later", 1), ("added", 1), ("low", 1), ("seen", 0), ("distances", 0)])
def test_causal_attention_reads_no_mask(spelling: str, hides: int) -> None:
    assert len(compared(Layer(SPELLINGS[spelling]), "train")[0].masks) == hides


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_keys_that_heads_share_are_read_once(mode: str) -> None:
    report, _ = compared(Layer(SPELLINGS["grouped"], H // 2), mode)
    assert [a.heads for a in report.grouped if a.heads > 1] == [2]


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("spelling", ["plain", "buffer", "added"])
def test_nothing_is_copied(spelling: str, mode: str) -> None:
    """Attention reads queries, keys and values where the product before it left them."""
    _, graph = compared(Layer(SPELLINGS[spelling]), mode)
    copies = [n for n in graph.nodes if n.target is aten.clone.default]
    assert not [n for n in copies if not n.all_input_nodes[0].meta["val"].is_contiguous()]


@pytest.mark.parametrize("image", [image, image_of_sums], ids=lambda f: f.__name__)
def test_what_is_added_by_places_is_features(image: Written) -> None:
    """No mask is made of two numbers for each query."""
    for mode in ("infer", "train"):
        report, graph = compared(Layer(image), mode)
        assert fused(graph) == 1 and [a.features for a in report.grouped if a.features] == [Y + T // Y]
        assert not [n for n in graph.nodes if n.target is EFFICIENT]
    report, graph = compared(Layer(image), "train", {"disable": frozenset({"positions"})})
    assert report.grouped == ()


def test_masks_of_all_samples_are_made_once() -> None:
    _, graph = compared(Layer(SPELLINGS["distances"]), "infer")
    (call,) = [n for n in graph.nodes if n.target is written_attention.CUDNN]
    assert call.args[3].meta["val"].shape == (1, H, T, T)


@pytest.mark.parametrize(("name", "value"), [("DTYPES", ()), ("KEYS", T + 1), ("NUMBERS", B * H * T * T + 1)])
def test_learned_masks_that_will_be_no_features(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """With a gradient they stay as they are written; in inference they are masks."""
    monkeypatch.setattr(features, name, value)
    assert fused(compared(Layer(image), "train")[1]) == 0
    assert fused(compared(Layer(image), "infer")[1]) == 1


def rows_alone(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    down = torch.bmm(q.reshape(B * H, T, D), a.learned[0, :D, :Y].expand(B * H, D, Y)).view(B, H, T, Y, 1)
    return ((q @ k.mT).view(B, H, T, Y, T // Y) + down).view(B, H, T, T).softmax(-1) @ v


def turned_table(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + a.table.mT).softmax(-1) @ v  # type: ignore[operator]


@pytest.mark.parametrize("attention", [rows_alone, turned_table], ids=lambda f: f.__name__)
def test_a_mask_lies_row_by_row(monkeypatch: pytest.MonkeyPatch, attention: Written) -> None:
    """What is the same for several keys is repeated for the kernel, and what is turned is copied."""
    monkeypatch.setattr(features, "KEYS", T + 1)
    _, graph = compared(Layer(attention), "infer")
    (call,) = [n for n in graph.nodes if n.target is written_attention.CUDNN]
    mask = call.args[3].meta["val"]
    assert mask.shape[1:] == (H, T, T) and mask.is_contiguous()


class Masked(Layer):
    """Attention by a mask that it is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        made = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        return self.o(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Two layers with one mask."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList(Masked(plain) for _ in range(2)), again

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(T)
        mask = (at - at[:, None]).clamp(-9, 0).to(x.dtype).masked_fill(at > at[:, None], -1e20)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask))
        return x


@pytest.mark.parametrize(("mode", "again", "masks"), [("infer", False, 1), ("train", False, 1), ("train", True, 2)])
def test_layers_share_a_mask(mode: str, again: bool, masks: int) -> None:
    _, graph = compared(Deep(again), mode)
    calls = [n for n in graph.nodes if n.target is written_attention.CUDNN]
    assert len(calls) == 2 and len({n.args[3] for n in calls}) == masks


class Viewed(nn.Module):
    """The result and a view of it are returned."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.unflatten(-1, (3, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
        made = (q @ k.mT * 0.3).softmax(-1) @ v
        return made, made.transpose(2, 3)


class Divided(nn.Module):
    """Scores are divided by a size that is a symbol, or by 0."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        return (q @ k.mT / by.shape[0]).softmax(-1) @ v, by * 2


@pytest.mark.parametrize("train", [False, True])
def test_results_that_share_memory(train: bool) -> None:
    given = [torch.randn(T, 2, 24, dtype=torch.float64, requires_grad=train) for _ in "qkv"]
    assert fused(compared(Viewed(), "train" if train else "infer", inputs=given)[1]) == 1


def test_what_no_number_divides() -> None:
    by = torch.randn(5, dtype=torch.float64)
    torch._dynamo.mark_dynamic(by, 0)
    given = [*(torch.randn(2, 3, T, 8, dtype=torch.float64) for _ in "qkv"), by]
    assert fused(both(Divided(), "infer", inputs=given)[2]) == 0
    given[-1] = torch.randn(0, dtype=torch.float64)
    assert fused(both(Divided(), "infer", inputs=given)[2]) == 0


class Again(Layer):
    """The backward computes the forward once more."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def test_under_checkpointing() -> None:
    assert fused(compared(Again(SPELLINGS["later"]), "train")[1]) == 1


@pytest.mark.parametrize("frozen", ["qkv", "o"])
def test_frozen_weights(frozen: str) -> None:
    model = Layer(SPELLINGS["later"])
    getattr(model, frozen).requires_grad_(False)
    assert fused(compared(model, "train")[1]) == 1


class Detached(nn.Module):
    """Only some of queries, keys and values have gradients."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.layer, self.trained = Layer(plain), trained
        self.attention, self.layer.attention = self.layer.attention, self.cut

    def cut(self, a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if name in self.trained else x.detach() for name, x in zip("qkv", (q, k, v), strict=True))
        return self.attention(a, q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("trained", ["q", "k", "qk", "kv"])
def test_some_gradients(trained: str) -> None:
    assert fused(compared(Detached(trained), "train")[1]) == 1


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("spelling", ["plain", "buffer", "distances"])
def test_inductor_writes_its_code(spelling: str, mode: str) -> None:
    assert "scaled_dot_product_cudnn" in code_of(compared(Layer(SPELLINGS[spelling]), mode)[1])


@pytest.mark.parametrize("how", [{"disable": frozenset({"attention"})}, {"numerics": "strict"}])
def test_it_may_be_switched_off(how: dict[str, object]) -> None:
    report, graph = compared(Layer(plain), "train", how)
    assert fused(graph) == 0 and report.grouped == ()


@pytest.mark.parametrize(("name", "value"), [("KEYS", T + 1), ("NUMBERS", B * H * T * T + 1)])
def test_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    with monkeypatch.context() as few:
        few.setattr(written, name, value)
        assert fused(compared(Layer(plain), "infer")[1]) == 0
    few.setattr(written, f"{name}_TRAINED", value)
    assert fused(compared(Layer(plain), "train")[1]) == 0
    assert fused(compared(Layer(plain), "infer")[1]) == 1


@pytest.mark.parametrize(("name", "value"), [("DTYPES", ()), ("STEP", 16), ("WIDEST", 4)])
def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(written, name, value)
    assert fused(compared(Layer(plain), "infer")[1]) == 0


def test_a_choice_among_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "chosen", lambda *_: False)
    assert fused(compared(Layer(plain), "infer")[1]) == 0


def test_low_scores_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 a number that hides may leave a row its scores."""
    monkeypatch.setattr(written, "WIDE", (torch.bfloat16,))
    assert fused(compared(Layer(UNKNOWN["low_of_buffers"]), "infer")[1]) == 0
    assert fused(compared(Layer(SPELLINGS["buffer"]), "infer")[1]) == 1
    assert fused(compared(Layer(SPELLINGS["low"]), "infer")[1]) == 1
