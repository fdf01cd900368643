"""What is added to scores and stays a mask."""

from __future__ import annotations

from typing import Any

import image_attention
import pytest
import torch
import torch.nn.functional as F
from image_attention import KERNELS, Attention, B, D, H, Mask, X, Y, aten, compared, number, sam, sam_of
from torch import Tensor, fx

from coda_inductor.attention import features
from coda_inductor.attention.positions import behind_padding
from coda_inductor.explain.capture import capture


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    image_attention.in_float64(monkeypatch)


def table(a: Attention, q: Tensor) -> Tensor:
    """What tells all keys apart in one tensor."""
    return a.along(q)[0].repeat(1, 1, 1, X).reshape(B, H, Y * X, Y * X)


def hidden(a: Attention, q: Tensor) -> Tensor:
    """Columns that are hidden: minus infinity times 0 would be no number."""
    h, w = a.along(q)
    none = torch.where(torch.arange(X) == 1, -torch.inf, 0.0).to(q.dtype)
    return (h[:, :, :, :, None] + (w + none)[:, :, :, None, :]).reshape(B, H, Y * X, Y * X)


def learned(a: Attention, q: Tensor) -> Tensor:
    """A table that the user may have filled with anything."""
    h, w = a.rows[..., 0], a.columns[..., 0]  # [Y, Y] and [X, X]
    both = h[:, None, :, None] + w[None, :, None, :]
    return both.reshape(1, 1, Y * X, Y * X).expand(B, H, -1, -1)


def numbered(a: Attention, q: Tensor) -> Tensor:
    return sam(a, q) + 1.0


def twice(a: Attention, q: Tensor) -> Tensor:
    h, w = a.along(q)
    return torch.add(h[:, :, :, :, None], w[:, :, :, None, :], alpha=2).reshape(B, H, Y * X, Y * X)


def widened(a: Attention, q: Tensor) -> Tensor:
    """One addend is a product in float32."""
    h, _ = a.along(q)
    narrow = q.reshape(B * H, Y, X, D).float()
    return sam_of(h, torch.einsum("bhwc,wkc->bhwk", narrow, a.columns.float()))


def biased(a: Attention, q: Tensor) -> Tensor:
    """One addend is a product and a bias that hides rows."""
    bias = torch.where(torch.arange(Y) == 1, -torch.inf, 0.0).to(q.dtype)
    h = torch.addmm(bias, q.reshape(-1, D), a.rows[0].T).reshape(-1, Y, X, Y)
    return sam_of(h, a.along(q)[1])


STAY: dict[str, Mask] = {
    "table": table,
    "hidden": hidden,
    "learned": learned,
    "numbered": numbered,
    "twice": twice,
    "widened": widened,
    "biased": biased,
}


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("mask", STAY)
def test_any_other_mask_stays(mask: str, mode: str) -> None:
    assert number(compared(Attention(STAY[mask]), mode)[0]) == []


class Read(Attention):
    """Its mask is read by something else, too."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(self, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2)), mask


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_mask_that_others_read_stays(mode: str) -> None:
    assert number(compared(Read(sam), mode)[0]) == []


def test_an_addend_that_is_overwritten_stays() -> None:
    """Its sum holds what was there before."""
    found = list[int]()

    def overwritten(graph: fx.Graph) -> None:
        product = graph.find_nodes(op="call_function", target=aten.bmm.default)[-1]
        attention = graph.find_nodes(op="call_function", target=KERNELS[1])[0]
        with graph.inserting_before(attention):
            node = graph.call_function(aten.mul_.Tensor, (product, 2))
        node.meta["val"] = product.meta["val"]
        found.append(len(features.write_positions(graph)))
        graph.erase_node(node)
        found.append(len(features.write_positions(graph)))

    capture(Attention(sam).double(), (torch.randn(B, Y * X, 16, dtype=torch.float64),), {}, "infer", overwritten)
    assert found == [0, 1]


@pytest.mark.parametrize("how", [{"scale": -0.3}, {"dropout": 0.5}])
def test_a_scale_below_zero_and_dropout_keep_the_mask(how: dict[str, Any]) -> None:
    assert number(compared(Attention(sam, **how), "train")[0]) == []


@pytest.mark.parametrize("how", [{"numerics": "strict"}, {"disable": frozenset({"positions"})}])
def test_it_can_be_switched_off(how: dict[str, Any]) -> None:
    assert number(compared(Attention(sam), "train", how)[0]) == []


@pytest.mark.parametrize(
    ("name", "value"), [("KEYS", Y * X + 1), ("NUMBERS", B * H * (Y * X) ** 2 + 1), ("WIDEST", 16)]
)
def test_few_keys_and_wide_heads_stay(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(features, name, value)
    assert number(compared(Attention(sam), "train")[0]) == []


LIBRARY = torch.library.Library("coda_tests_positions", "DEF")
LIBRARY.define("twice(*, Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda *, x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("coda_tests_positions::twice", lambda *, x: torch.empty_like(x), lib=LIBRARY)


class Doubled(torch.autograd.Function):
    """What reads the gradient has no argument by place."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor) -> Tensor:
        return mask.view_as(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.coda_tests_positions.twice(x=grad)


def test_a_gradient_that_something_else_reads_stays() -> None:
    def mask(a: Attention, q: Tensor) -> Tensor:
        return Doubled.apply(sam(a, q))  # type: ignore[no-any-return, no-untyped-call]

    assert number(compared(Attention(mask), "train")[0]) == []


def padded(given: list[int], pads: list[int], dim: int, start: int, end: int) -> fx.Node | None:
    """Of a tensor whose rows are made longer, and of which a part is taken, what that is the same as."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    wide = graph.call_function(aten.constant_pad_nd.default, (x, pads))
    part = graph.call_function(aten.slice.Tensor, (wide, dim, start, end))
    x.meta["val"] = torch.empty(given, device="meta")
    for node in (wide, part):
        node.meta["val"] = node.target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args))  # type: ignore[operator]
    return x if behind_padding(part) is x else None


def test_what_is_made_longer_and_cut_off_is_the_same() -> None:
    assert padded([2, 6, 6], [0, 2], 2, 0, 6) is not None
    assert padded([2, 6, 6], [0, 2], -1, 0, 6) is not None
    for pads, dim, start, end in (
        ([0, 2], 2, 1, 7),
        ([2, 0], 2, 0, 6),
        ([2, 0], 2, 2, 8),
        ([0, 2], 2, 0, 8),
        ([0, 0, 0, 2], 1, 0, 6),
        ([0, 2], 2, 0, 5),
    ):
        assert padded([2, 6, 6], pads, dim, start, end) is None


@pytest.mark.parametrize("target", [aten.slice_scatter.default, aten.constant_pad_nd.default])
def test_what_is_made_longer_may_have_another_reader(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    monkeypatch.setattr(image_attention, "X", 7)
    found = list[int]()

    def read(graph: fx.Graph) -> None:
        wide, output = graph.find_nodes(op="call_function", target=target)[0], graph.output_node()
        before = output.args
        output.args = ((*before[0], wide),)  # type: ignore[misc]
        found.append(len(features.write_positions(graph)))
        output.args = before
        found.append(len(features.write_positions(graph)))

    x = torch.randn(B, Y * 7, 16, dtype=torch.float64, requires_grad=True)
    capture(Attention(sam).double(), (x,), {}, "train", read)
    assert found == [0, 1]
