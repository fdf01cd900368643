"""Rotary embeddings of a part of each head are computed of all parts, in an epilogue; what is something else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import strict_reference
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.inductor import joint
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.parts.heads import compute_all_parts

BATCH, TOKENS, HEADS, WIDTH, PART, INPUT = 2, 6, 3, 16, 8, 12


torch.manual_seed(0)
W = torch.randn(HEADS * WIDTH, INPUT, dtype=torch.float64, requires_grad=True)
B = torch.randn(HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
ANGLES = torch.rand(TOKENS, PART, dtype=torch.float64)
COS, SIN = ANGLES.cos(), ANGLES.sin()
EACH = torch.rand(HEADS, 1, PART, dtype=torch.float64)
Program = Callable[[Tensor], Tensor]


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def queries(x: Tensor, width: int = WIDTH) -> Tensor:
    """Heads before tokens."""
    return F.linear(x, W).view(x.shape[0], -1, HEADS * WIDTH // width, width).transpose(1, 2)


def rotated(x: Tensor, by: Callable[[Tensor], Tensor] = halves) -> Tensor:
    return x * COS[: x.shape[-2]] + by(x) * SIN[: x.shape[-2]]


def first(x: Tensor, by: Callable[[Tensor], Tensor] = halves) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., :PART], by), q[..., PART:]], -1)


def last(x: Tensor) -> Tensor:
    rest, part = queries(x).split([WIDTH - PART, PART], -1)
    return torch.cat([rest, rotated(part)], -1)


def middle(x: Tensor) -> Tensor:
    """Of heads of three parts."""
    q = queries(x, 3 * PART)
    return torch.cat([q[..., :PART], rotated(q[..., PART : 2 * PART]), q[..., 2 * PART :]], -1)


def by_token(x: Tensor) -> Tensor:
    q = F.linear(x, W).view(*x.shape[:2], HEADS, WIDTH)
    cos, sin = COS[: x.shape[1], None], SIN[: x.shape[1], None]
    part = q[..., :PART]
    return torch.cat([part * cos + halves(part) * sin, q[..., PART:]], -1)


def with_a_bias(x: Tensor) -> Tensor:
    q = F.linear(x, W, B).view(x.shape[0], -1, HEADS, WIDTH).transpose(1, 2)
    return torch.cat([rotated(q[..., :PART]), q[..., PART:]], -1)


def by_complex_numbers(x: Tensor) -> Tensor:
    q = F.linear(x, W).view(*x.shape[:2], HEADS, WIDTH)
    table = torch.view_as_complex(torch.stack([COS, SIN], -1)[:, ::2])[: x.shape[1], None]
    part = torch.view_as_complex(q[..., :PART].reshape(*q.shape[:-1], -1, 2))
    return torch.cat([torch.view_as_real(part * table).flatten(-2), q[..., PART:]], -1)


def with_an_empty_one(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., :PART]), q[..., PART:], x.new_empty(0)], -1)


FIRES: dict[str, Program] = {
    "halves": first,
    "neighbours": lambda x: first(x, neighbours),
    "last": last,
    "middle": middle,
    "by token": by_token,
    "with a bias": with_a_bias,
    "complex numbers": by_complex_numbers,
    "beside an empty tensor": with_an_empty_one,
}


def of_each_head(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([q[..., :PART] * EACH, q[..., PART:]], -1)


def other_heads(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q.flip(1)[..., :PART]), q[..., PART:]], -1)


def summed(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., :PART]).softmax(-1), q[..., PART:]], -1)


def over_heads(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([q[..., :PART] - q[..., :PART].sum(1, keepdim=True), q[..., PART:]], -1)


def elsewhere(x: Tensor) -> Tensor:
    """The rest stands at another place."""
    q = queries(x)
    return torch.cat([q[..., PART:], rotated(q[..., :PART])], -1)


def of_the_other_part(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., PART:]), q[..., PART:]], -1)


def of_both_parts(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., :PART]) * q[..., PART:], q[..., PART:]], -1)


def no_multiple(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([q[..., :6] * 2, q[..., 6:]], -1)


def features(x: Tensor) -> Tensor:
    """Of a product that has no heads, tokens lie one behind the other."""
    z = F.linear(x, W)
    return torch.cat([z[..., :24].exp(), z[..., 24:]], -1)


def dropped(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([q[..., :PART] * 2, q[..., PART:] * 3], -1)


def of_two_dtypes(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([rotated(q[..., :PART]).to(torch.float32), q[..., PART:]], -1)


def of_another_rank(x: Tensor) -> Tensor:
    """One head of two tokens: dimensions that are no heads have as many entries."""
    q = queries(x[:1, :2], HEADS * WIDTH)
    part = q[..., :PART]
    return torch.cat([(part.unflatten(-1, (2, -1)) * part[..., :1]).flatten(-2), q[..., PART:]], -1)


def of_complex_numbers(x: Tensor) -> Tensor:
    q = F.linear(x.to(torch.complex128), W.to(torch.complex128)).view(*x.shape[:2], HEADS, WIDTH)
    return torch.view_as_real(torch.cat([q[..., :PART] * 2j, q[..., PART:]], -1)).flatten(-2)


def selected(x: Tensor) -> Tensor:
    q = queries(x)
    return torch.cat([q[..., 0].unsqueeze(-1) * 2, q[..., 1:]], -1)


STAYS: dict[str, Program] = {
    "another rank": of_another_rank,
    "complex numbers": of_complex_numbers,
    "a selected feature": selected,
    "of two dtypes": of_two_dtypes,
    "another factor for each head": of_each_head,
    "heads in another order": other_heads,
    "sums over the features": summed,
    "sums over the heads": over_heads,
    "the rest elsewhere": elsewhere,
    "of the other part": of_the_other_part,
    "of both parts": of_both_parts,
    "no multiple": no_multiple,
    "no heads": features,
    "both parts are computed": dropped,
}


def rewritten(f: Program, *, batch: int = BATCH, dynamic: bool = False, through: bool = False, **options: Any) -> int:
    """How often. Results, their strides and gradients are eager's; `through` Inductor, or as the graph says."""
    made = list[int]()

    def counted(graph: torch.fx.Graph, halves: tuple[int, ...]) -> int:
        made.append(compute_all_parts(graph, halves))
        return made[-1]

    def ran(f: Program, x: Tensor) -> list[Tensor]:
        x.grad = W.grad = B.grad = None
        out = f(x.requires_grad_())
        out.backward(out.detach().cos())
        return [out.detach(), *(t.grad for t in (x, W, B) if t.grad is not None)]

    x = torch.randn(batch, TOKENS, INPUT, dtype=torch.float64)
    with strict_reference(run=through), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "compute_all_parts", counted)
        compiled = torch.compile(f, backend="coda", options=options)
        for some in (x, x[:, 1:].contiguous()) if dynamic else (x,):
            for dim in (0, 1) if dynamic else ():
                torch._dynamo.mark_dynamic(some, dim)
            for mine, theirs in zip(ran(compiled, some), ran(f, some), strict=True):
                assert mine.stride() == theirs.stride()
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    return sum(made)


@pytest.mark.parametrize("name", FIRES)
def test_it_is_an_epilogue(name: str) -> None:
    assert rewritten(FIRES[name]) == 1
    assert [site.region.half > 0 for site in REPORTS[-1].sites] == [True]


@pytest.mark.parametrize("name", STAYS)
def test_what_is_something_else_stays(name: str) -> None:
    assert rewritten(STAYS[name]) == 0


@pytest.mark.parametrize("name", ["halves", "neighbours", "by token"])
def test_with_any_number_of_sequences_and_tokens(name: str) -> None:
    assert rewritten(FIRES[name], dynamic=True) == 1


def test_one_within_another() -> None:
    """Of one token. The inner one is rewritten."""

    def f(x: Tensor) -> Tensor:
        q = queries(x[:, :1])
        part = q[..., :PART].contiguous()
        inner = torch.cat([part[..., : PART // 2].exp(), part[..., PART // 2 :]], -1)
        return torch.cat([(inner.unflatten(-1, (2, -1)) * 2).flatten(-2), q[..., PART:]], -1)

    assert rewritten(f) <= 1


def test_through_inductor() -> None:
    assert rewritten(first, through=True) == rewritten(by_complex_numbers, through=True) == 1


def test_of_one_sequence() -> None:
    assert rewritten(first, batch=1) == 1


def test_it_is_exact_and_so_no_law() -> None:
    """What is not chosen may be infinite, and under strict numerics it is done as well."""
    x = torch.randn(BATCH, TOKENS, INPUT, dtype=torch.float64)
    x[0, 0, 0] = float("inf")
    for numerics in ("default", "strict"):
        torch._dynamo.reset()
        f = torch.compile(first, backend="coda", options=REFERENCE | {"strict": True, "numerics": numerics})
        with torch.no_grad():
            assert torch.equal(f(x).nan_to_num(), first(x).nan_to_num())


def test_switched_off() -> None:
    assert rewritten(first, disable="heads") == 0 and not REPORTS[-1].sites


class Layers(nn.Module):
    """Attention of two layers, as GLM-4 (neighbours) and Nemotron spell it."""

    def __init__(self, by: Callable[[Tensor], Tensor], width: int, part: int) -> None:
        super().__init__()
        self.by, self.width, self.part = by, width, part
        self.products = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for q, k in (self.products[:2], self.products[2:]):
            heads = [f(x).view(2, -1, 512 // self.width, self.width).transpose(1, 2) for f in (q, k)]
            parts = [h[..., : self.part] for h in heads]
            turned = [
                torch.cat([p * cos + self.by(p) * sin, h[..., self.part :]], -1)
                for p, h in zip(parts, heads, strict=True)
            ]
            to, of = turned
            x = F.scaled_dot_product_attention(to, of, to, is_causal=True).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("by", [halves, neighbours])
@pytest.mark.parametrize(("width", "part", "regions"), [(128, 64, 4), (64, 16, 0), (128, 96, 0)])
def test_for_a_kernel_that_divides_such_heads(
    by: Callable[[Tensor], Tensor], width: int, part: int, regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of 32, 64 and 128 features. Of others nothing is rewritten."""
    made = list[int]()
    monkeypatch.setattr(joint, "compute_all_parts", lambda *given: made.append(compute_all_parts(*given)))
    with torch.device("meta"):
        model, x = Layers(by, width, part).bfloat16(), torch.empty(2, 512, 512, dtype=torch.bfloat16)
        table = torch.empty(512, part, dtype=torch.bfloat16)
    facts = explain(model, (x, table, table), {}, "infer", Settings(target="sm_90a"))
    (graph,) = facts["graphs"]
    assert [(len(r["products"]), r["n"]) for r in graph["regions"]] == [(2, 256)] * regions
    assert sum(made) == regions


def test_all_layers_read_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()

    def counted(graph: torch.fx.Graph, halves: tuple[int, ...]) -> int:
        count = compute_all_parts(graph, halves)
        found.append(len(graph.find_nodes(op="call_function", target=torch.ops.prims.iota.default)))
        return count

    def f(x: Tensor) -> Tensor:
        return first(x) @ first(2 * x).transpose(-1, -2)

    monkeypatch.setattr(joint, "compute_all_parts", counted)
    x = torch.randn(BATCH, TOKENS, INPUT, dtype=torch.float64)
    with strict_reference(run=False), torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="coda")(x), f(x))
    assert found == [1]
