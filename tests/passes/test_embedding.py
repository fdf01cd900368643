"""The gradient of an embedding in the rows that occur: equal to the sum over all rows, and what is left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from torch import Tensor, fx, nn

from coda_inductor.inductor import joint
from coda_inductor.passes import embedding

ROWS, WIDTH, TOKENS = 512, 24, 40
STRICT = REFERENCE | {"strict": True}

pytestmark = pytest.mark.usefixtures("uncached")
values_alone = pytest.mark.usefixtures("interpreted")


class Model(nn.Module):
    """An embedding, a product, a norm, and a head, which may be the embedding again."""

    def __init__(self, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.product, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.rms_norm(self.product(self.embedding(ids)), (WIDTH,))
        return F.cross_entropy(self.head(x).float().flatten(0, -2), ids.flatten())


def gradients(model: nn.Module, ids: Tensor, *, dynamic: bool = False, **options: object) -> list[Tensor]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="coda", dynamic=dynamic, options=STRICT | options)
    return [*torch.autograd.grad(run(ids), list(model.parameters()))]


def exact(model: nn.Module, ids: Tensor) -> list[Tensor]:
    wide = copy.deepcopy(model).double()
    return [*torch.autograd.grad(wide(ids), list(wide.parameters()))]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each graph had rewritten; also those of small embeddings are."""
    found, write = list[int](), embedding.write_rows

    def counted(graph: fx.Graph) -> int:
        found.append(write(graph))
        return found[-1]

    monkeypatch.setattr(embedding, "LARGE", 1)
    monkeypatch.setattr(joint, "write_rows", counted)
    return found


def close(mine: list[Tensor], without: list[Tensor], wanted: list[Tensor]) -> None:
    """As near to float64 as the gradients of the program as it was."""
    for found, plain, want in zip(mine, without, wanted, strict=True):
        error, allowed = (float((t.double() - want).norm() / want.norm().clamp_min(1e-9)) for t in (found, plain))
        assert error <= 1.05 * allowed + 1e-6


# torch marks a tensor that it has compiled for as dynamic: each test has a copy.
DRAWN = {
    "few": torch.randint(0, 5, (2, TOKENS), generator=torch.Generator().manual_seed(0)),
    "one": torch.full((2, TOKENS), 3),
    "all different": torch.arange(2 * TOKENS).view(TOKENS, 2).t().contiguous(),
    "three dimensions": torch.arange(2 * TOKENS).view(2, TOKENS // 4, 4) % 7,
    "no batch": torch.arange(2 * TOKENS) % 7,
}


CASES = [(drawn, tied, 3) for drawn in DRAWN for tied in (True, False)] + [("few", True, None), ("few", True, -1)]


@pytest.mark.sampled
@values_alone
@pytest.mark.parametrize(("drawn", "tied", "padding"), CASES)
def test_it_is_the_sum_over_the_tokens_of_each_row(
    written: list[int], drawn: str, tied: bool, padding: int | None
) -> None:
    """Of tokens that repeat, of one alone, of padding, which counts for nothing."""
    torch.manual_seed(0)
    model, ids = Model(tied, padding).bfloat16(), DRAWN[drawn].clone()
    mine = gradients(model, ids)
    assert written == [1]
    close(mine, gradients(model, ids, disable="embedding"), exact(model, ids))
    assert written == [1]


class Read(nn.Module):
    """A tensor of rows that is read in other ways, or by others too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(ROWS, WIDTH))
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        weight, product = self.weight, self.product
        if self.how == "twice":
            out = product(weight[ids] * weight[ids.flip(0)])
        elif self.how == "beside a sum of itself":
            out = product(F.embedding(ids, weight)).float().square().sum() + weight.float().square()
        elif self.how == "columns":
            out = product(weight.t()[ids % WIDTH][..., :WIDTH])
        else:
            out = weight[ids, ids % WIDTH] * product(weight[:TOKENS]).sum(1)
        total: Tensor = out.float().square().sum()
        return total


OTHERS = {"twice": 0, "beside a sum of itself": 1, "columns": 0, "elements": 0}


@values_alone
@pytest.mark.parametrize(("how", "count"), OTHERS.items())
def test_other_readers(written: list[int], how: str, count: int) -> None:
    torch.manual_seed(0)
    model, ids = Read(how).bfloat16(), DRAWN["few"].clone()
    mine = gradients(model, ids)
    assert written == [count]
    close(mine, gradients(model, ids, disable="embedding"), exact(model, ids))


@values_alone
def test_what_is_left_as_it_is(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are many tokens for the rows, where nothing is rounded, where the tokens are not counted."""
    torch.manual_seed(0)
    many = torch.randint(0, ROWS, (2, ROWS // 8 + 4))
    for model, ids, dynamic in (
        (Model(True).bfloat16(), many, False),
        (Model(True).double(), DRAWN["few"].clone(), False),
        (Model(True).bfloat16(), DRAWN["few"].clone(), True),
    ):
        written.clear()
        gradients(model, ids, dynamic=dynamic)
        assert written == [0]
    monkeypatch.setattr(embedding, "LARGE", 1 << 24)
    written.clear()
    gradients(Model(True).bfloat16(), DRAWN["few"].clone())
    assert written == [0]


class Regularised(nn.Module):
    """An embedding whose sum, or the sum of its rows or its columns, is in the loss: their gradients are expanded."""

    def __init__(self, over: int | None) -> None:
        super().__init__()
        self.over, self.weight, self.product = over, nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        added = self.weight.sum() if self.over is None else self.weight.sum(self.over).square().sum()
        total: Tensor = self.product(F.embedding(ids, self.weight)).float().square().sum() + added.float()
        return total


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("over", [None, 0, 1])
def test_beside_a_gradient_that_is_one_row_for_all(written: list[int], over: int | None, strict: bool) -> None:
    """Through Inductor, which would write the rows into that one."""
    torch.manual_seed(0)
    model, ids = Regularised(over).bfloat16(), DRAWN["few"].clone()
    mine = gradients(model, ids, strict=strict)
    assert written == [1] and all(g.stride() == p.stride() for g, p in zip(mine, model.parameters(), strict=True))
    close(mine, gradients(model, ids, disable="embedding"), exact(model, ids))


def test_through_inductor(written: list[int]) -> None:
    """Its kernels read a row before one of them writes it, also where all tokens are one."""
    for drawn in ("few", "one"):
        written.clear()
        torch.manual_seed(0)
        model, ids = Model(True).bfloat16(), DRAWN[drawn].clone()
        torch._dynamo.reset()
        run = torch.compile(model, backend="coda", dynamic=False, options=REFERENCE)
        mine = [*torch.autograd.grad(run(ids), list(model.parameters()))]
        close(mine, gradients(model, ids, disable="embedding"), exact(model, ids))
        assert written == [1], drawn


@values_alone
@pytest.mark.parametrize("how", ["one row", "a number", "a mask", "negative", "int32"])
def test_indices_and_values_of_other_kinds(written: list[int], how: str) -> None:
    """What is broadcast, or no list of rows, is left; rows may be counted from the end."""
    torch.manual_seed(0)
    rows, index, weight = torch.randn(TOKENS, WIDTH), torch.randint(0, 7, (TOKENS,)), torch.randn(WIDTH, WIDTH)

    def f(rows: Tensor, index: Tensor) -> Tensor:
        into, made = torch.zeros(ROWS, WIDTH), rows @ weight
        if how == "a mask":
            return into.index_put((torch.arange(ROWS) < TOKENS,), made, accumulate=True).bfloat16()
        values = {"one row": made[0], "a number": made.sum()}.get(how, made)
        index = {"negative": torch.where(index < 3, index - ROWS, index), "int32": index.int()}.get(how, index)
        return into.index_put((index,), values, accumulate=True).bfloat16()

    found = torch.compile(f, backend="coda", dynamic=False, options=STRICT)(rows, index)
    assert written == [int(how in ("negative", "int32"))]
    assert torch.allclose(found.float(), f(rows, index).float(), rtol=1e-2, atol=1e-2)


@values_alone
def test_what_is_added_to_is_zero(written: list[int]) -> None:
    """Rows of a program's own, added up in zeros, and in ones."""
    torch.manual_seed(0)
    rows, index, weight = torch.randn(TOKENS, WIDTH), torch.randint(0, 7, (TOKENS,)), torch.randn(WIDTH, WIDTH)

    def f(rows: Tensor, index: Tensor, start: float) -> Tensor:
        into = torch.full((ROWS, WIDTH), start)
        return into.index_put((index,), rows @ weight, accumulate=True).bfloat16()

    for start, count in ((0.0, 1), (1.0, 0)):
        written.clear()
        torch._dynamo.reset()
        found = torch.compile(f, backend="coda", dynamic=False, options=STRICT)(rows, index, start)
        assert written == [count]
        assert torch.allclose(found.float(), f(rows, index, start).float(), rtol=1e-2, atol=1e-2)
