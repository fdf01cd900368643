"""Which loops hold their rows in registers: asked of the loops that Inductor makes of programs, on the CPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from coda_inductor.codegen.target import SM_90A, SM_100A
from coda_inductor.inductor import compile as compiling
from coda_inductor.schedule import held
from coda_inductor.schedule.held import Holding, fits, holding, holds, rows_held

ROWS = 64


def layer(x: Tensor, y: Tensor) -> Any:
    h = x + y
    return h, F.layer_norm(h, h.shape[-1:])


def rounded(x: Tensor, y: Tensor) -> Any:
    h = x * y
    return h / h.abs().amax(-1, keepdim=True)


def apart(x: Tensor, y: Tensor) -> Any:
    """Rows with a gap behind each."""
    return layer(x[:, :-8], y[:-8])


def transposed(x: Tensor, y: Tensor) -> Any:
    """Its columns are stored one beside the other."""
    h = x * y
    return (h / h.abs().amax(-1, keepdim=True)).t().contiguous()


def across(x: Tensor, y: Tensor) -> Any:
    """Its rows are columns of what it reads."""
    h = x.view(-1, ROWS).t()
    return torch.add(h.abs().amax(-1, keepdim=True), h).contiguous() + y


def columns(x: Tensor, y: Tensor) -> Any:
    return x / (x * y).sum(0)


def once(x: Tensor, y: Tensor) -> Any:
    return (x * y).sum(-1)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each loop that reduces, in the order of the graph: would its rows be held?"""
    found, codegen = list[bool](), CppScheduling.codegen_node

    def asked(self: Any, node: Any) -> Any:
        reduced = [n for n in node.get_nodes() if n.is_reduction()]
        if reduced:
            outer, inner = (sympy_product(sizes) for sizes in reduced[0].get_ranges())
            found.append(holds(SIMDKernelFeatures(node.get_nodes(), outer, inner), 8192))
        return codegen(self, node)

    monkeypatch.setattr(CppScheduling, "codegen_node", asked)
    return found


@pytest.mark.parametrize(
    ("program", "width", "wanted"),
    [
        (layer, 2048, True),
        (layer, 1536, True),
        (rounded, 4096, True),
        (apart, 2048, True),
        (layer, 5120, False),
        (layer, 16384, False),
        (transposed, 2048, False),
        (across, 2048, False),
        (columns, 2048, False),
        (once, 2048, False),
    ],
)
def test_which_rows_are_held(
    loops: list[bool], program: Callable[..., Any], width: int, wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, held.log.name)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(program)(torch.randn(2048 if program is columns else ROWS, width), torch.randn(width))
    assert loops and any(loops) == wanted
    assert any("holds them in registers" in said for said in caplog.messages) == wanted


def test_rows_of_any_length_are_not(loops: list[bool]) -> None:
    torch._dynamo.reset()
    x = torch.randn(ROWS, 2048)
    torch._dynamo.mark_dynamic(x, 1)
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(lambda x: F.layer_norm(x, x.shape[-1:]))(x)
    assert loops and not any(loops)


def test_lanes() -> None:
    """A row's are the next power of two, a loop's multiples of 2048."""
    assert all(fits(n, 8192) for n in (1025, 1536, 2048, 2049, 2560, 4096, 7168, 8192))
    assert not any(fits(n, 8192) for n in (5120, 6144, 8193, 16384, 128256))
    assert not fits(4096, 2048)


class Own(InductorChoices):
    """A user's."""

    def __init__(self) -> None:
        self.said = "the user's"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        return bool(features == "theirs")


def test_the_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "holds", lambda features, longest: (features, longest) == ("ours", 8192))
    made: Any = holding(Own(), 8192)
    assert isinstance(made, Own) and made.said == "the user's"
    chosen = made.should_use_persistent_reduction
    assert [chosen(x, False) for x in ("theirs", "ours", "neither")] == [True, True, False]
    assert chosen("theirs", True) and not chosen("ours", True)


def test_none_are_held_where_nothing_was_measured() -> None:
    assert (SM_90A.longest_held, SM_100A.longest_held) == (8192, 0)
    assert rows_held(test_lanes, 0) is test_lanes


def test_the_caches_know() -> None:
    assert len({str(Holding(n).uuid()) for n in (2048, 8192)}) == 2
    Holding(8192)(torch.fx.Graph())


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("disable", ["", "rows"])
def test_the_backward_is_compiled_with_the_same_choices(monkeypatch: pytest.MonkeyPatch, disable: str) -> None:
    """In a thread of autograd's, as on a GPU, where Inductor begins with its own."""
    asked, own = list[bool](), type(V.choices)

    def seen(*args: Any, **kwargs: Any) -> Any:
        asked.append(type(V.choices).__qualname__.startswith("holding"))
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(compiling, "machine", lambda *_: SM_90A)
    monkeypatch.setattr(compiling, "compile_fx_inner", seen)
    torch._dynamo.reset()
    x = torch.randn(8, 16, requires_grad=True)
    options: dict[str, Any] = {"target": "reference", "disable": disable}
    y = torch.compile(lambda x: (F.layer_norm(x, (16,)) @ x.t()).sum(), backend="coda", options=options)(x)
    backward = threading.Thread(target=y.backward)
    backward.start()
    backward.join()
    assert asked == [not disable] * 2
    assert x.grad is not None and type(V.choices) is own
