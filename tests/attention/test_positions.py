"""What is added to scores by the place of a key along one of its axes, as in SAM, is features of queries and
keys: the same in float64, forward and backward. Here by the definition of attention; with CUDA's kernels in
tests/gpu/test_attention.py."""

from __future__ import annotations

import image_attention
import pytest
import torch
import torch.nn.functional as F
from image_attention import SPELLINGS, Attention, B, D, H, X, Y, aten, compared, number, sam, sam_of, written
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    image_attention.in_float64(monkeypatch)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_mask_is_features(spelling: str, scale: float | None, mode: str) -> None:
    mask, wanted = SPELLINGS[spelling]
    report, graph = compared(Attention(mask, scale), mode)
    assert number(report) == [wanted]
    sizes = [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [s for s in sizes if s.numel() >= B * H * (Y * X) ** 2]  # nothing is as large as the mask


class Shared(Attention):
    """Two calls read one mask: their gradients are added up before they are summed."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(self, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = F.scaled_dot_product_attention(out, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_two_calls_may_read_one_mask() -> None:
    assert number(compared(Shared(sam), "infer")[0]) == [Y + X] * 2
    assert number(compared(Shared(sam), "train")[0]) == []


class OfHeads(Attention):
    """All heads share a mask: its gradient is summed over them, too."""

    def along(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q = q.mean(1).reshape(B, Y, X, D)
        return torch.einsum("bhwc,hkc->bhwk", q, self.rows), torch.einsum("bhwc,wkc->bhwk", q, self.columns)


def shared(a: Attention, q: Tensor) -> Tensor:
    h, w = a.along(q)
    return (h[:, :, :, :, None] + w[:, :, :, None, :]).reshape(B, 1, Y * X, Y * X)


def test_all_heads_may_share_a_mask() -> None:
    assert number(compared(OfHeads(shared), "infer")[0]) == [Y + X]
    assert number(compared(OfHeads(shared), "train")[0]) == []


def flat(a: Attention, q: Tensor) -> Tensor:
    """One mask [tokens, tokens] for all samples and heads."""
    q = q.mean((0, 1)).reshape(Y, X, D)
    h, w = torch.einsum("hwc,hkc->hwk", q, a.rows), torch.einsum("hwc,wkc->hwk", q, a.columns)
    return (h[:, :, :, None] + w[:, :, None, :]).reshape(Y * X, Y * X)


def test_a_mask_may_be_a_matrix() -> None:
    assert number(compared(Attention(flat), "infer")[0]) == [Y + X]


class Again(Attention):
    """The backward computes the forward once more."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def test_under_checkpointing() -> None:
    assert number(compared(Again(sam), "train")[0]) == [Y + X]


@pytest.mark.parametrize("spelling", ["sam", "columns_first"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_an_odd_number_of_keys(monkeypatch: pytest.MonkeyPatch, spelling: str, mode: str) -> None:
    """The memory-efficient kernel reads such a mask behind a copy with longer rows."""
    monkeypatch.setattr(image_attention, "X", 7)
    report, graph = compared(Attention(SPELLINGS[spelling][0]), mode)
    assert number(report) == [Y + 7]
    assert not graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)


def huge(a: Attention, q: Tensor) -> Tensor:
    """A product that hides every second row by the least number there is: over the scale it would be infinite."""
    zero, most = (torch.full((), x, dtype=q.dtype) for x in (0.0, torch.finfo(q.dtype).min))
    least = torch.where(torch.arange(Y) % 2 == torch.arange(2)[:, None], most, zero)
    h = (F.one_hot(torch.arange(Y * X) % 2, 2).to(q.dtype) @ least).reshape(1, Y, X, Y)
    return sam_of(h, a.along(q)[1])


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_least_number_hides(mode: str) -> None:
    assert number(compared(Attention(huge), mode)[0]) == [Y + X]


@pytest.mark.parametrize("spelling", ["sam", "in_parts"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_inductor_takes_what_is_written(spelling: str, mode: str) -> None:
    """Of all that is written there is a lowering; a CPU does not run it."""
    code = written(compared(Attention(SPELLINGS[spelling][0]), mode)[1])
    assert "cudnn_attention.default(" in code and "efficient_attention.default(" not in code
