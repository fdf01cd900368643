"""The laws: proved, true in float64, false where they say so, and not fired there. Each firing is an equality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from evaluate import NAMES, Read, captured, compiled, error, flat, read
from hypothesis import given
from hypothesis import strategies as st
from small_tensors import rms
from torch import Tensor
from zoo import CASES, Case

from coda_inductor.patterns.lift import lift
from coda_inductor.plan.search import plan
from coda_inductor.rewrite.derive import derive
from coda_inductor.rewrite.laws import LAWS, Law
from coda_inductor.rewrite.program import Program

each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
REFUSALS = [(law, i) for law in LAWS for i in range(len(law.refuses))]
each_refusal = pytest.mark.parametrize(("law", "i"), REFUSALS, ids=lambda x: x.name if isinstance(x, Law) else str(x))


def shape_of(text: str, dims: dict[str, int]) -> tuple[int, ...]:
    """ "M 1" -> (M, 1)."""
    return tuple(int(d) if d.isdigit() else dims[d] for d in text.split())


def symbols(shapes: dict[str, str], dims: dict[str, int]) -> list[Any]:
    """An array of distinct positive symbols for each name."""
    arrays = []
    for name, text in shapes.items():
        shape = shape_of(text, dims)
        named = [sympy.Symbol(f"{name}_{'_'.join(map(str, i))}", positive=True) for i in np.ndindex(*shape)]
        arrays.append(np.array(named, dtype=object).reshape(shape))
    return arrays


def numbers(shapes: dict[str, str], dims: dict[str, int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape_of(s, dims), generator=generator, dtype=torch.float64) + 0.5 for s in shapes.values()]


def holds(law: Law, shapes: dict[str, str], dims: dict[str, int], seed: int = 0) -> bool:
    """Are both sides the same array of float64? Sides that do not even fit together are not."""
    arrays = numbers(shapes, dims, seed)
    try:
        before, after = law.before(*arrays), law.after(*arrays)
    except RuntimeError:
        return False
    return before.shape == after.shape and torch.allclose(before, after, rtol=1e-12, atol=1e-12)


def test_names_are_unique() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS)


@each_law
def test_proof(law: Law) -> None:
    """Both sides are multilinear or quadratic in the entries, or roots of squares, so that small matrices of symbols
    prove it. (Python writes an exponent of a half as a float.)"""
    arrays = symbols(law.shapes, {"M": 2, "K": 3, "N": 2})
    difference = np.asarray(law.before(*arrays) - law.after(*arrays))
    assert difference.size and all(sympy.simplify(sympy.nsimplify(x)) == 0 for x in difference.ravel())


@each_law
@given(dims=st.fixed_dictionaries(dict.fromkeys("MKN", st.integers(2, 9))), seed=st.integers(0, 99))
def test_law_holds(law: Law, dims: dict[str, int], seed: int) -> None:
    assert holds(law, law.shapes, dims, seed)


@each_law
def test_each_law_says_when_and_why(law: Law) -> None:
    assert all(set(r) == set(law.shapes) and r != law.shapes for r in law.refuses)
    assert law.when and law.source and law.numerics in ("exact", "moves a rounding")


def test_every_refused_shape_has_a_graph() -> None:
    assert set(GRAPHS) == {(law.name, i) for law, i in REFUSALS}


@each_refusal
@given(dims=st.fixed_dictionaries(dict.fromkeys("MKN", st.integers(2, 9))))
def test_what_a_law_refuses_is_false(law: Law, i: int, dims: dict[str, int]) -> None:
    assert not holds(law, law.refuses[i], dims)


# For each refused shape a function whose graph has it, made late, so that the law would be wanted if it held.
Function = Callable[[Tensor, Tensor, Tensor], Any]


def mean(x: Tensor, dim: int = -1) -> Tensor:
    return x.mean(dim, keepdim=True)


def a_tile_as_factor(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """r is [M, K]: it waits for the whole row, but it varies over the contracted axis."""
    h = x @ w
    return (h * torch.tanh(h.cumsum(-1))) @ v


def a_feature_as_factor(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """r is [1, K]: it waits for all tokens of the operand itself."""
    h = x @ w
    return (h * h.cumsum(0)[-1:]) @ v


def a_feature_scaling(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """Two products that agree on no row scaling, for their operand is scaled over K."""
    h = x @ w
    n = h * torch.rsqrt(mean(h * h, 0) + 1)
    return n @ v, n @ w


def a_tile_as_shift(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The sum of a value that differs from its mean by a tile."""
    h = x + x @ w
    return (h - h.cumsum(-1)) * mean(h - h.cumsum(-1))


def moments_about_a_tile(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x + x @ w
    return (mean((h - x.cumsum(-1) * mean(h)) ** 2) * h) @ v


def softmax_about_a_tile(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x @ w
    s = h - h.cumsum(-1)
    return s - s.exp().sum(-1, keepdim=True).log()


GRAPHS: dict[tuple[str, int], Function] = {
    ("bilinearity", 0): a_tile_as_factor,
    ("bilinearity", 1): a_feature_as_factor,
    ("gauge", 0): a_feature_scaling,
    ("shift", 0): a_tile_as_shift,
    ("moments", 0): moments_about_a_tile,
    ("softmax", 0): softmax_about_a_tile,
}


@each_refusal
@pytest.mark.parametrize("square", [False, True])
def test_no_law_fires_where_it_refuses(law: Law, i: int, square: bool) -> None:
    """Also where all sizes are equal, so that only the axes tell rows from columns."""
    function = GRAPHS[law.name, i]
    m, k = (8, 8) if square else (12, 8)
    args = tuple(torch.randn(s, dtype=torch.float64) for s in ((m, k), (k, k), (k, k)))
    for graph in captured(function, *args):
        fired = derive(Program(lift(graph.graph)), frozenset(law.name for law in LAWS))
        assert not [f for f in fired if f.law in (law.name, "bilinearity")]
    found, _ = compiled(function, *args, run=False)
    for f, w in zip(flat(found), flat(function(*args)), strict=True):
        assert error(f, w) < 1e-10


def check_firings(r: Read) -> Counter[str]:
    """Every firing's terms are equal in float64, on the values of its graph; returns how many of which law."""
    fired: Counter[str] = Counter()
    for firing in plan(r.lifted).firings:
        fired[firing.law] += 1
        assert firing.before is not firing.after
        assert error(r.value(firing.after), r.value(firing.before)) < 1e-10, f"{firing.before} -> {firing.after}"
    return fired


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_firings_are_equalities(kind: str, name: str | int) -> None:
    for r in read(kind, name):
        check_firings(r)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_fires_in_the_zoo(case: Case) -> None:
    (r,) = read("zoo", case.name)
    fired = check_firings(r)
    assert fired["bilinearity"] >= case.deferred and bool(fired["bilinearity"]) == bool(case.deferred)
    if "LayerNorm" in case.shape.norm and case.shape.order != "post":
        assert fired["shift"] and fired["moments"]


@pytest.mark.parametrize("case", [c for c in CASES if c.deferred][:3], ids=lambda case: case.name)
def test_deriving_again_reads_the_graph_alone(case: Case) -> None:
    """What an earlier derivation left in the table of terms neither fires again nor changes anything."""
    (r,) = read("zoo", case.name)
    laws = frozenset(law.name for law in LAWS)
    first, second = Program(r.lifted), Program(r.lifted)
    fired = derive(first, laws)
    assert fired and len([*r.lifted.terms]) > len(r.lifted.read)
    assert derive(second, laws) == fired
    assert second.new == first.new and second.products_of == first.products_of
    assert all(r.lifted.terms.rebuild(t, t.args) is t for t in r.lifted.read if t.args)


def test_a_norm_fires_bilinearity_once_for_each_reader() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
        n = rms(x @ w)
        return n @ v, n @ u

    args = tuple(torch.randn(s, dtype=torch.float64) for s in ((12, 6), (6, 8), (8, 4), (8, 5)))
    (graph,) = captured(f, *args)
    assert check_firings(Read(graph)) == {"bilinearity": 2}
