"""Which loops hold their rows in registers: read in the Triton code that Inductor writes, without a GPU."""

from __future__ import annotations

import functools
import logging
import operator
import pickle
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from coda_inductor.codegen.target import SM_90A, SM_100A
from coda_inductor.core.errors import CodaWarning
from coda_inductor.inductor import compile as compiling
from coda_inductor.schedule import held
from coda_inductor.schedule.held import CacheMark, Choices, fits, rows_held

ROWS = 64
HELD, LOOPED = "persistent_reduction", "reduction"
Written = Callable[..., list[str]]


class WrittenOut(Exception):
    """The code is there; what runs it is not."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """The kinds of the kernels that reduce, in the code that Inductor would compile for a GPU."""
    codes = list[str]()

    def stop(graph: Any) -> Any:
        made = graph.codegen()[0]
        codes.append(getattr(made, "value", made))
        raise WrittenOut

    for name in ("compile_to_module", "_compile_to_module"):
        monkeypatch.setattr(GraphLowering, name, stop)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")

    def kinds(program: Callable[..., Any], *given: Tensor, longest: int = 8192, **options: Any) -> list[str]:
        codes.clear()
        torch._dynamo.reset()
        inner = rows_held(compile_fx_inner, longest)
        here = {"cpu_backend": "triton", "force_disable_caches": True, "compile_threads": 1}
        with inductor_config.patch(here | options), pytest.raises(Exception, match="WrittenOut"):
            torch.compile(program, backend=lambda gm, inputs: compile_fx(gm, inputs, inner))(*given)
        return re.findall(r"@triton_heuristics\.(\w*reduction)\(", codes[0])

    return kinds


def layer(x: Tensor, y: Tensor) -> Any:
    h = x + y
    return h, F.layer_norm(h, h.shape[-1:])


def rounded(x: Tensor, y: Tensor) -> Any:
    h = x * y
    return h / h.abs().amax(-1, keepdim=True)


def twice(x: Tensor, y: Tensor) -> Any:
    """A norm, and the largest number of each of its rows."""
    n = F.rms_norm(x + y, x.shape[-1:])
    return n.abs().amax(-1)


def apart(x: Tensor, y: Tensor) -> Any:
    """Rows with a gap behind each."""
    return layer(x[:, :-8], y[:-8])


def of_heads(x: Tensor, y: Tensor) -> Any:
    """Heads of 128 lie one behind another, as attention returns them."""
    return rounded(x.view(-1, ROWS, 128).transpose(0, 1).flatten(1), y)


def across(x: Tensor, y: Tensor) -> Any:
    """Its rows are columns of what it reads."""
    return layer(x, x.view(-1, ROWS).t())


def flipped(x: Tensor, y: Tensor) -> Any:
    return layer(x, x.flip(-1) + y)


def picked(x: Tensor, y: Tensor) -> Any:
    """Its numbers lie anywhere."""
    return layer(x, x[:, y.long()])


def repeated(x: Tensor, y: Tensor) -> Any:
    return layer(x, y[: y.shape[0] // 2].repeat_interleave(2))


def turned(x: Tensor, y: Tensor) -> Any:
    """Blocks in three dimensions, two of which lie otherwise."""
    z = x.view(16, x.shape[1], -1)
    return F.layer_norm(x.view(-1, 16, x.shape[1]) + z.permute(2, 0, 1).flip(-1), x.shape[-1:])


def columns(x: Tensor, y: Tensor) -> Any:
    return x / (x * y).sum(0)


def once(x: Tensor, y: Tensor) -> Any:
    """All in one walk."""
    h = x + y
    return h, h.sum(-1), h.amax(-1), torch.var_mean(h, -1)


def summed_up(x: Tensor, y: Tensor) -> Any:
    return layer(x, x.cumsum(-1) + y)


def few(x: Tensor, y: Tensor) -> Any:
    a, b, c, d = x.unflatten(1, (4, -1)).unbind(1)
    return layer(a * b + c, d)


@pytest.mark.parametrize(
    ("program", "width", "kind"),
    [
        (layer, 2048, HELD),
        (layer, 1536, HELD),
        (layer, 8192, HELD),
        (rounded, 4096, HELD),
        (twice, 2560, HELD),
        (apart, 2048, HELD),
        (of_heads, 2048, HELD),
        (layer, 5120, LOOPED),
        (layer, 16384, LOOPED),
        (layer, 1024, HELD),  # by Inductor itself
        (across, 2048, LOOPED),
        (flipped, 2048, LOOPED),
        (picked, 2048, LOOPED),
        (repeated, 2048, LOOPED),
        (turned, 8192, LOOPED),
        (columns, 2048, LOOPED),
        (once, 2048, LOOPED),
        (summed_up, 2048, LOOPED),
        (few, 4 * 2048, HELD),
    ],
)
def test_which_rows_are_held(
    written: Written, program: Callable[..., Any], width: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, held.log.name)
    given = torch.randn(2048 if program is columns else ROWS, width), torch.randn(width)
    found = written(program, *given)
    assert found and {*found} == {kind}
    assert any("holds them in registers" in said for said in caplog.messages) == (kind == HELD and width > 1024)
    assert width == 1024 or {*written(program, *given, longest=0)} == {LOOPED}


@pytest.mark.parametrize(
    ("count", "dtype", "kind"),
    [(2, torch.float32, HELD), (2, torch.float64, LOOPED), (20, torch.float32, LOOPED), (20, torch.bfloat16, LOOPED)],
)
def test_the_room_for_rows(written: Written, count: int, dtype: torch.dtype, kind: str) -> None:
    """A thread has so many registers, and 64 bits take two."""

    def ratio(*x: Tensor) -> Tensor:
        total = functools.reduce(operator.add, x)
        return total / total.abs().amax(-1, keepdim=True)

    whole = torch.randn(ROWS, count * 8192).to(dtype)
    assert kind in written(ratio, *(part.clone() for part in whole.chunk(count, 1)))
    assert kind in written(lambda x: ratio(*x.chunk(count, 1)), whole)


@pytest.mark.filterwarnings("error::coda_inductor.core.errors.CodaWarning")
@pytest.mark.parametrize(("dim", "kind"), [(0, HELD), (1, LOOPED)])
def test_symbolic_sizes(written: Written, dim: int, kind: str) -> None:
    """Any number of rows, but not of columns."""
    x = torch.randn(ROWS, 2048)
    torch._dynamo.mark_dynamic(x, dim)
    assert written(lambda x: F.layer_norm(x, x.shape[-1:]), x) == [kind]


def test_rows_across_any_number_of_them(written: Written) -> None:
    """Their step in memory is a symbol."""
    x, z = torch.randn(ROWS, 2048), torch.randn(2048, ROWS)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(z, 1)
    assert HELD not in written(lambda x, z: layer(x, z.t()), x, z)


@pytest.mark.parametrize(
    ("index", "names", "wanted"),
    [
        ("2048*d0 + d1", "d0 d1", True),
        ("d0", "d0 d1", True),
        ("2048*d0 + 512*(d1//64) + Mod(d1, 64)", "d0 d1", True),
        ("0", "", True),
        ("2048*d0 + d1//2", "d0 d1", False),
        ("2048*d0 - d1", "d0 d1", False),
        ("s0*d1 + d0", "d0 d1", False),
        ("2048*d0 + indirect0", "d0 d1", False),
    ],
)
def test_what_lies_along_rows(index: str, names: str, wanted: bool) -> None:
    symbols = {name: sympy.Symbol(name, integer=True) for name in ("d0", "d1", "s0", "indirect0")}
    found = tuple(symbols[name] for name in names.split())
    dep = MemoryDep("x", sympy.sympify(index, locals=symbols), found, (sympy.Integer(64),) * len(found))
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=set(), writes={dep}))
    assert held.along_rows(node) == wanted


def test_no_tiles_of_several_rows(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such with more than 4096 columns Inductor has no kernel."""
    holds = held.holds
    monkeypatch.setattr(held, "holds", lambda features, tilings, n: holds(features, [tilings[0] | {"y": 2}], n))
    assert written(layer, torch.randn(ROWS, 8192), torch.randn(8192)) == [LOOPED]


OPTIONS: dict[str, Any] = {
    "triton.persistent_reductions": False,
    "triton.multi_kernel": 1,
    "triton.cooperative_reductions": True,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_inductors_options_stay(written: Written, option: str) -> None:
    """Who switches persistent reductions off has none. Where Inductor tries both kinds, it tries both."""
    given, told = (torch.randn(ROWS, 2048), torch.randn(2048)), {option: OPTIONS[option]}
    assert written(layer, *given, **told) == written(layer, *given, longest=0, **told)


def test_lanes() -> None:
    """A row's are the next power of two, a loop's multiples of 2048."""
    assert all(fits(n, 8192) for n in (1025, 1536, 2048, 2049, 2560, 4096, 7168, 8192))
    assert not any(fits(n, 8192) for n in (64, 1024, 5120, 6144, 8193, 16384, 128256))
    assert not fits(4096, 2048)


class Own(InductorChoices):
    """A user's."""

    said = "the user's"

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> dict[str, Any]:
        return {**kernel_kwargs, **({held.PERSISTENT: False} if features == "theirs" else {"seen": True})}


def test_the_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come first, and all others are theirs."""
    monkeypatch.setattr(held, "holds", lambda features, tilings, longest: (features, longest) != ("other", 8192))
    own = Own()
    made = pickle.loads(pickle.dumps(Choices(own, 8192)))
    assert made.said == own.said
    own.said = "anew"
    assert Choices(own, 8192).said == "anew"
    chosen = {x: made.triton_kernel_kwargs(None, x, [], {}) for x in ("theirs", "ours", "other")}
    assert chosen["theirs"] == {held.PERSISTENT: False}
    assert chosen["ours"] == {"seen": True, held.PERSISTENT: True}
    assert chosen["other"] == {"seen": True}


def test_names_of_another_torch_leave_loops_as_they_are(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "goes_again", lambda *_: torch.nothing)  # type: ignore[attr-defined]
    with pytest.warns(CodaWarning, match="does not hold its rows: AttributeError: .* 'nothing'"):
        assert written(layer, torch.randn(ROWS, 2048), torch.randn(2048)) == [LOOPED]


def test_none_are_held_where_nothing_was_measured() -> None:
    assert (SM_90A.longest_held, SM_100A.longest_held) == (8192, 0)
    assert rows_held(test_lanes, 0) is test_lanes


def test_the_caches_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many columns are held, and by which sources."""
    names = {str(CacheMark(n).uuid()) for n in (2048, 8192)}
    monkeypatch.setattr(held, "sources_digest", lambda: "others")
    assert len({*names, str(CacheMark(8192).uuid())}) == 3
    CacheMark(8192)(torch.fx.Graph())


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("disable", ["", "rows"])
def test_the_backward_is_compiled_with_the_same_choices(monkeypatch: pytest.MonkeyPatch, disable: str) -> None:
    """In a thread of autograd's, as on a GPU, where Inductor begins with its own."""
    asked, own = list[bool](), type(V.choices)

    def seen(*args: Any, **kwargs: Any) -> Any:
        asked.append(isinstance(V.choices, Choices))
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
