"""Rotary embeddings that pair neighbouring features, in the spellings that people use: values, tables, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_cases import rotary_neighbours, rotary_tables
from compiling import REFERENCE, close, run
from torch import Tensor, nn

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify

BATCH, LENGTH, HEADS, SIZE = 2, 6, 3, 8
WIDTH, HALF = HEADS * SIZE, SIZE // 2
STRICT = REFERENCE | {"strict": True}

pytestmark = pytest.mark.usefixtures("interpreted")

Inputs = dict[str, Tensor]


def inputs() -> Inputs:
    torch.manual_seed(0)
    angles = torch.rand(LENGTH, HALF, dtype=torch.float64)
    shapes = {
        "x": (BATCH, LENGTH, WIDTH),
        "w": (WIDTH, WIDTH),
        "b": (WIDTH,),
        "one": (SIZE, WIDTH),
        "v": (WIDTH, WIDTH),
    }
    drawn = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return drawn | {"cos": angles.cos(), "sin": angles.sin(), "turns": torch.polar(torch.ones_like(angles), angles)}


def heads(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """[batch, tokens, heads, size]."""
    out: Tensor = F.linear(x, w, b).unflatten(-1, (-1, SIZE))
    return out


def as_complex(q: Tensor, i: Inputs) -> Tensor:
    """As TorchTitan spells it."""
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    turned: Tensor = torch.view_as_real(pairs * i["turns"][:, None]).flatten(-2)
    return turned


def every_second(q: Tensor, i: Inputs) -> Tensor:
    """As GPT-J does: tables of each angle twice."""
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (i["cos"], i["sin"]))
    return q * cos + torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin


def unbound(q: Tensor, i: Inputs) -> Tensor:
    a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = i["cos"][:, None], i["sin"][:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def two_tables(q: Tensor, i: Inputs) -> Tensor:
    """Both features of a pair have angles of their own."""
    cos, sin = (torch.stack((i[name], i[name].exp()), -1).flatten(-2)[:, None] for name in ("cos", "sin"))
    return q * cos + torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin


def swapped(q: Tensor, i: Inputs) -> Tensor:
    out: Tensor = q.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).tanh() * q
    return out


Spelling = Callable[[Tensor, Inputs], Tensor]
SPELLINGS: dict[str, tuple[Spelling, int]] = {
    "complex": (as_complex, 1), "every second": (every_second, 1), "unbound": (unbound, 1),
    "two tables": (two_tables, 2),
}  # fmt: skip
"""With how many tables each is read."""
AROUND: dict[str, Callable[[Spelling, Inputs], Tensor]] = {
    "alone": lambda f, i: f(heads(i["x"], i["w"]), i),
    "bias": lambda f, i: f(heads(i["x"], i["w"], i["b"]), i),
    "one head": lambda f, i: f(heads(i["x"], i["one"]), i),
    "heads first": lambda f, i: f(heads(i["x"], i["w"]), i).transpose(1, 2),
    "after a norm": lambda f, i: f(heads(F.rms_norm(i["x"] @ i["v"], (WIDTH,)), i["w"]), i),
    "multiplied on": lambda f, i: f(heads(i["x"], i["w"]), i).flatten(-2) @ i["v"],
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_made_in_the_epilogue(spelling: str, around: str) -> None:
    rotate, tables = SPELLINGS[spelling]
    given = inputs()

    def f(i: Inputs) -> Tensor:
        return AROUND[around](rotate, i)

    ran = run(f, given, options=STRICT)
    close(ran.output, f(given))
    (region,) = (site.region for report in ran.reports for site in report.sites if site.region.half)
    assert region.neighbours and region.half == HALF and region.block == 1
    assert sum(o.extent == "table" for o in region.operands) == tables


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_its_gradients_are_eagers(spelling: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (w(x).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
            q, k = (SPELLINGS[spelling][0](t, given) for t in (q, k))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            weights = torch.tanh(q @ k.transpose(2, 3))  # torch 2.11 cannot run attention's gradient in float64
            return (weights @ v).transpose(1, 2).flatten(2)

    given = inputs()
    model, x = Attention().double(), given["x"].requires_grad_()
    ran = run(model, x, grad=True, options=STRICT)
    assert sum(site.region.neighbours for report in ran.reports for site in report.sites) == 2
    close(ran.output, model(x))
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    found = torch.autograd.grad(torch.compile(model, backend="coda", options=STRICT)(x).square().sum(),
                                [x, *model.parameters()])  # fmt: skip
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)


def moved_apart(q: Tensor, i: Inputs) -> Tensor:
    """The rotated pairs leave as halves of each head, as of some checkpoints: another order than their columns'."""
    a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = i["cos"][:, None], i["sin"][:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def every_third(q: Tensor, i: Inputs) -> Tensor:
    return q[..., 1::3].tanh()


@pytest.mark.parametrize(
    "f", [moved_apart, swapped, every_third, lambda q, i: q[..., 1:7:2].tanh(), lambda q, i: q[..., ::2]]
)
def test_what_is_no_pair_of_neighbours_is_right_all_the_same(f: Spelling) -> None:
    given = inputs()

    def program(i: Inputs) -> Tensor:
        return f(heads(i["x"], i["w"]), i)

    ran = run(program, given, options=STRICT)
    close(ran.output, program(given))
    assert not any(site.region.neighbours for report in ran.reports for site in report.sites)


def test_rows_are_no_features() -> None:
    """Every second token, and tokens put together by pairs."""
    given = inputs()

    def f(i: Inputs) -> Any:
        y = F.linear(i["x"], i["w"])
        return y[:, ::2].tanh() + torch.stack((y[:, 1::2], y[:, ::2]), 2).flatten(1, 2)[:, 1::2]

    close(run(f, given, options=STRICT).output, f(given))


def test_what_a_well_formed_region_of_neighbours_is() -> None:
    region = rotary_neighbours(256, 64)
    assert "in0 @ in1.T[:, even]" in show(region) and "in0 @ in1.T[:, odd]" in show(region)
    with pytest.raises(BrokenInvariant, match="without halves"):
        verify(dataclasses.replace(region, half=0))
    with pytest.raises(Unsupported, match="2 stores of neighbouring features"):
        legality.check(dataclasses.replace(rotary_tables(4096, 4096), neighbours=True))


def test_which_tiles_fit_neighbours() -> None:
    """A table is read by whole heads or parts of one; a weight as it lies, whatever the cluster."""
    for half, config, fits in (
        (64, Config(128, 256, 2, 1, False), True),
        (64, Config(128, 192, 2, 1, True), False),
        (32, Config(128, 192, 2, 1, True), True),
        (128, Config(128, 64, 1, 1, False), True),
    ):
        assert legality.is_legal(rotary_neighbours(4096, 4096, half), config) is fits
    assert legality.candidates(rotary_neighbours(4096, 4096), 8192)[0] == SM_90A.large[0]


def test_a_kernel_is_compiled_for_one_width_of_heads() -> None:
    """The width of a table is part of what is compiled, so it is in the text that names it."""
    texts = {source.render(rotary_neighbours(4096, 4096, half)) for half in SM_90A.halves}
    assert len(texts) == len(SM_90A.halves)
