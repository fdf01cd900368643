"""What a pass makes is written over the tensor that it is made of where nobody reads that any more, and only there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.elementwise import Elementwise, Output, parse, verify
from coda_inductor.core.region import Let, Operand
from coda_inductor.ops import elementwise, lowering
from coda_inductor.ops.custom import AFTER, STORED

M, N = 6, 16
OPERANDS = (Operand("x", "tile", "f32"), Operand("s", "token", "f32"))
LETS = (Let("v", "mul", ("x", "s")), Let("w", "add", ("v", 1.0)))


def text(*outputs: Output) -> str:
    return verify(Elementwise(N, OPERANDS, LETS, outputs)).text


RECORD = text(Output("w", "f32"))
ROUNDED = text(Output("w", "bf16"))
TURNED = text(Output("w", "f32", True))
LARGEST = text(Output("w", "f32", False, "N"))
TWO = (Operand("x", "tile", "f32"), Operand("y", "tile", "f32"))
OF_TWO = verify(Elementwise(N, TWO, (Let("v", "mul", ("x", "y")),), (Output("v", "f32"),))).text
PER_COLUMN = (Operand("x", "tile", "f32"), Operand("y", "feature", "f32"))
OF_COLUMNS = verify(Elementwise(N, PER_COLUMN, (Let("v", "add", ("x", "y")),), (Output("v", "f32"),))).text
TWICE = text(Output("v", "f32"), Output("w", "f32"))


@pytest.fixture(autouse=True)
def lowered() -> Iterator[None]:
    torch._dynamo.reset()
    lowering.register()
    elementwise.register()
    yield
    torch._dynamo.reset()


def made(x: Tensor, s: Tensor, record: str = RECORD) -> Tensor:
    out: Tensor = torch.ops.coda.elementwise([x, s], record, "reference")[0]
    return out


def both(x: Tensor, s: Tensor) -> Tensor:
    out: list[Tensor] = torch.ops.coda.elementwise([x, s], TWICE, "reference")
    return out[0] + out[1]


def beside(x: Tensor, y: Tensor, record: str = OF_TWO) -> Tensor:
    out: Tensor = torch.ops.coda.elementwise([x, y], record, "reference")[0]
    return out


def chunked_late(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    piece = y.chunk(2, 0)[1]
    return made(y, s) @ w.t(), piece.sin()


def unbound_late(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    piece = y.view(2, 3, N).unbind(0)[1]
    return made(y, s) @ w.t(), piece


def of_a_chunk(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    piece, _ = (x @ w).chunk(2, 0)
    return made(piece, s[:3]) @ w.t(), piece.sin()


def of_the_first_chunk(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    piece, _ = (x @ w).chunk(2, 0)
    return made(piece, s[:3]) @ w.t()


def read_late(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    out = made(y, s)
    return out @ w.t(), y.exp()


def viewed_late(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    rows = y.view(2, -1)
    return made(y, s) @ w.t(), rows.sum(1)


def cast_late(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    same = torch.ops.prims.convert_element_type(y, torch.float32)
    return made(y, s) @ w.t(), same.exp()


def read_early(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.exp().sum(1), made(y, s) @ w.t()


def picked_early(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    picked = (y.exp() - 1).gather(1, torch.arange(M)[:, None])
    out = made(y, s)
    return picked + 1, out @ w.t()


def in_blocks(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = AFTER(x @ w, [s])
    picked = STORED(y.exp()[:, :1])
    return picked, AFTER(made(y, s), [picked]) @ w.t()


def twice(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return made(made(x @ w, s), s) @ w.t()


Program = Callable[[Tensor, Tensor, Tensor], Any]
PROGRAMS: dict[str, tuple[Program, int]] = {
    "nobody else reads it": (lambda x, w, s: made(x @ w, s) @ w.t(), 1),
    "it is returned": (lambda x, w, s: made(x @ w, s), 1),
    "both are returned": (lambda x, w, s: (y := x @ w, made(y, s)), 0),
    "read behind": (read_late, 0),
    "a view is read behind": (viewed_late, 0),
    "what is cast to its own dtype is read behind": (cast_late, 0),
    "read before": (read_early, 1),
    "picked before": (picked_early, 1),
    "in another shape": (lambda x, w, s: made((x @ w).view(2, 3, N).reshape(M, N), s).view(3, 2, N) * 2, 1),
    "in blocks": (in_blocks, 1),
    "over it once more": (twice, 2),
    "of an input": (lambda x, w, s: made(w, s[:1].expand(w.shape[0]).clone()) * 2, 0),
    "of a view of an input": (lambda x, w, s: made(w.view(-1)[: M * N].view(M, N), s) * 2, 0),
    "rounded": (lambda x, w, s: made(x @ w, s, ROUNDED).float() * 2, 0),
    "transposed": (lambda x, w, s: made(x @ w, s, TURNED) * 2, 0),
    "the largest": (lambda x, w, s: made(x @ w, s, LARGEST) * 2, 0),
    "a chunk is read behind": (chunked_late, 0),
    "an item is returned": (unbound_late, 0),
    "a chunk of it, which is read behind": (of_a_chunk, 0),
    "a chunk of it, and no other": (of_the_first_chunk, 1),
    "with its first row": (lambda x, w, s: beside((y := x @ w), y[0], OF_COLUMNS) * 2, 0),
    "with the first row of another": (lambda x, w, s: beside(x @ w, w[0], OF_COLUMNS) * 2, 1),
    "two outputs": (lambda x, w, s: both(x @ w, s), 0),
    "beside another": (lambda x, w, s: beside(x @ w, w[:M]) * 2, 1),
    "beside the row below": (lambda x, w, s: beside((y := x @ w)[:-1], y[1:]) * 2, 0),
    "a part of it": (lambda x, w, s: made((x @ w)[1:], s[1:]) * 2, 1),
    "a part, and the other one is read": (lambda x, w, s: (made((y := x @ w)[1:], s[1:]) * 2, y[:1] + 1), 0),
}
"""Programs of x [M, K], w [K, N] and s [M], each with how many of its passes write over what they read."""


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_written_over_what_nobody_reads(name: str) -> None:
    program, count = PROGRAMS[name]
    torch.manual_seed(0)
    given = torch.randn(M, 16), torch.randn(16, N), torch.rand(M)
    before = [x.clone() for x in given]
    with inductor_config.patch(reorder_for_locality=False):  # as in training
        found, codes = run_and_get_code(torch.compile(program, fullgraph=True), *given)
    torch.testing.assert_close(found, program(*given))
    assert all(map(torch.equal, given, before))
    assert sum(code.count("ops.coda.elementwise_over_.default(") for code in codes) == count


def test_a_cast_to_its_own_dtype_has_no_memory_of_its_own() -> None:
    """Inductor's lowering returns what it is given. (Its patterns drop such casts before.)"""

    def program(x: Tensor, w: Tensor, s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        y = x @ w
        cast = torch.ops.prims.convert_element_type(y, dtype)
        return made(y, s) + 1, cast.exp()

    given = torch.empty(M, 16), torch.empty(16, N), torch.empty(M)
    found = dict[torch.dtype, bool]()
    for dtype in (torch.float32, torch.bfloat16):
        graph = make_fx(functools.partial(program, dtype=dtype), tracing_mode="fake")(*given).graph
        (op,) = graph.find_nodes(op="call_function", target=elementwise.ELEMENTWISE)
        found[dtype] = elementwise.may_overwrite(parse(RECORD), op)
    assert found == {torch.float32: False, torch.bfloat16: True}
