"""Queries, keys and values that are copied for attention alone: it reads them where they lie, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, Ran, close, run
from cuda_attention import on_cuda
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from coda_inductor.attention.calls import attention
from coda_inductor.attention.copies import copied

pytestmark = pytest.mark.usefixtures("uncached")
B, T, HEADS, SIZE = 2, 24, 4, 16
WIDTH = HEADS * SIZE


class Whisper(nn.Module):
    """Attention whose operands are laid with the heads first, as transformers' Whisper lays them."""

    def __init__(self, how: str = "contiguous") -> None:
        super().__init__()
        self.how, self.kept = how, list[Tensor]()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def laid(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return x.clone(memory_format=torch.contiguous_format) if self.how == "clone" else x.contiguous()

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(F.gelu(made.transpose(1, 2).reshape(*made.shape[::2][:1], T, WIDTH)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return self.attention(*(self.laid(w(x)) for w in (self.q, self.k, self.v)))


class Packed(Whisper):
    """Parts of one product, all of which the backward keeps anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*map(self.laid, self.qkv(x).chunk(3, -1)))


class Two(Packed):
    """Of such parts the keys are turned first: for the backward, all would be kept for two."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.attention(self.laid(q), self.laid(k).sin(), self.laid(v))


class Read(Whisper):
    """The copy of the keys is read elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.laid(w(x)) for w in (self.q, self.k, self.v))
        read: Tensor = self.attention(q, k, v) + k.cumsum(1).transpose(1, 2).flatten(2)
        return read


class Ragged(Whisper):
    """Rows begin at places that are no multiples of 16 bytes, or columns lie in rows, numbers lie apart, or all samples
    are one."""

    def laid(self, x: Tensor) -> Tensor:
        match self.how:
            case "odd":
                x = torch.cat([x, x[..., :1]], -1)
            case "columns":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            case "apart":
                x = torch.stack([x, x.sin()], -1).flatten(2)[..., ::2]
            case "one":
                x = x[:1].expand(B, -1, -1)
        heads: Tensor = x[..., :WIDTH].unflatten(-1, (HEADS, SIZE))
        return heads.transpose(1, 2).contiguous()


class Returned(Whisper):
    """What keys are copied of is returned: the caller may overwrite it before the backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k(x)
        return self.attention(self.laid(self.q(x)), self.laid(k), self.laid(self.v(x))), k.detach()


class Written(Whisper):
    """What values are copied of is overwritten within the graph."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.attention(self.laid(self.q(x)), self.laid(self.k(x)), self.laid(x))
        x.mul_(0)
        return made


class Heads(Whisper):
    """The result itself is returned, and lies as it did."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.laid(w(x)) for w in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


class Shared(Whisper):
    """Two results share memory: neither can lie in another order."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self.laid(w(x)) for w in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v)
        return made, made[:, 0]


class InMemory(Whisper):
    """What is made of the result is read by its place in memory."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.laid(w(x)) for w in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v)
        if self.how == "drawn":
            return self.o(F.dropout(made, 0.5, True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
        made = made.sin() + 1 if self.how == "behind" else made
        return torch.as_strided(made, (B * T, WIDTH), (WIDTH, 1)).cos() @ self.o.weight


class Parts(Whisper):
    """Parts that are dense by themselves, of products of more tokens."""

    def forward(self, x: Tensor) -> Tensor:
        more = torch.cat([x] * 7)
        q, k, v = (self.laid(w(more)[:B]) for w in (self.q, self.k, self.v))
        return self.attention(q, k, v)


class Checkpointed(Whisper):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def gone(ran: Ran) -> int:
    """How many copies."""
    return sum(len(read.absorbed) for report in ran.reports for read in report.grouped)


def compared(model: nn.Module, *, grad: bool, overwrite: bool = False) -> int:
    """How many copies went; results and gradients are eager's."""
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(B, T, WIDTH, dtype=torch.float64)
    found = list[list[Tensor]]()
    for compile_it in (False, True):
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_(grad)
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad):
            ran = run(model, leaf, grad=grad, options=REFERENCE) if compile_it else None
            made = model(leaf) if ran is None else ran.output
        out, *others = made if isinstance(made, tuple) else (made,)
        assert not ran
        if overwrite:
            others[0].mul_(3)
        if grad:
            (out * torch.linspace(-1, 1, out.shape[-1], dtype=torch.float64)).sum().backward()
        found.append([out, *others, *(t.grad for t in (leaf, *model.parameters()) if t.grad is not None)])
    for mine, eager in zip(found[1], found[0], strict=True):
        close(mine, eager)
    assert ran is not None
    return gone(ran)


@pytest.mark.sampled
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["contiguous", "clone"])
def test_nothing_is_copied_for_attention(how: str, grad: bool) -> None:
    assert compared(Whisper(how), grad=grad) == 3


def test_under_checkpointing() -> None:
    assert compared(Checkpointed(), grad=True) >= 3


@pytest.mark.parametrize("grad", [False, True])
def test_parts_of_one_product(grad: bool) -> None:
    assert compared(Packed(), grad=grad) == 3


def test_two_parts_of_a_product_of_three() -> None:
    assert compared(Two(), grad=True) == 0 and compared(Two(), grad=False) == 2


def test_dense_parts_of_products() -> None:
    assert compared(Parts(), grad=True) == 0 and compared(Parts(), grad=False) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["itself", "behind", "drawn"])
def test_what_is_read_by_its_place_in_memory(how: str, grad: bool) -> None:
    with inductor_config.patch(fallback_random=True):
        assert compared(InMemory(how), grad=grad) == 3


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_that_is_read_elsewhere_stays(grad: bool) -> None:
    assert compared(Read(), grad=grad) == 2


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["odd", "columns", "apart", "one"])
def test_rows_that_kernels_cannot_read_are_copied(how: str) -> None:
    assert compared(Ragged(how), grad=False) == 0


def test_what_the_caller_may_overwrite_is_copied() -> None:
    assert compared(Returned(), grad=True, overwrite=True) == 2
    assert compared(Returned(), grad=False) == 3


def test_what_the_graph_overwrites_is_copied() -> None:
    assert compared(Written(), grad=False) == 2


@pytest.mark.parametrize("grad", [False, True])
def test_a_result_lies_as_it_did(grad: bool) -> None:
    model = Heads()
    model.o = nn.Identity()  # type: ignore[assignment]
    assert compared(model, grad=grad) == 3


def test_results_that_share_memory_lie_as_they_did() -> None:
    assert compared(Shared(), grad=False) == 0


def test_a_copy_of_the_gradient_stays() -> None:
    graph = on_cuda("cudnn")
    *_, gradient = graph.find_nodes(op="placeholder")
    backward = next(call.node for call in attention(graph) if call.is_backward)
    with graph.inserting_before(backward):
        copy = graph.call_function(torch.ops.aten.clone.default, (gradient,))
    copy.meta["val"] = gradient.meta["val"]
    backward.replace_input_with(gradient, copy)
    assert copied(graph) == {}


def test_with_a_length_of_symbols() -> None:
    torch.manual_seed(0)
    model = Heads().double()
    x = torch.randn(B, T, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        ran = run(model, x, options=REFERENCE, dynamic=True)
        assert ran == [] and gone(ran) == 3
        close(ran.output, model(x))
