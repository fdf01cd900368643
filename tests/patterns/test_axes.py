"""Axes and sizes: views as lists of atomic axes, unification with splitting, and what must not become one axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coda_inductor.patterns.axes import Axes, Misfit
from coda_inductor.patterns.sizes import ONE, Size, product, size_of


def symbol(env: ShapeEnv, hint: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"s{hint}")
    expression = env.create_symbol(hint, source)
    return env.create_symintnode(expression, hint=hint, source=source)


def test_sizes_are_monomials_and_ask_nothing() -> None:
    env = ShapeEnv()
    a, b = symbol(env, 6), symbol(env, 10)
    assert size_of(12) == Size(12) and Size(12).static == 12
    assert size_of(a * b * 4) == size_of(b) * Size(4) * size_of(a)
    assert size_of(a * b * 4).over(size_of(a) * Size(2)) == size_of(b) * Size(2)
    assert size_of(a).over(size_of(b)) is None and size_of(a).over(Size(2)) is None and Size(6).over(Size(4)) is None
    assert Size(6).over(Size(0)) is None
    assert size_of(a + 1) == size_of(a + 1) != size_of(a) and size_of(a + 1).static is None
    assert size_of((a + 1) * 3).over(size_of(a + 1)) is None  # torch expands it; then it is another factor
    assert size_of(a * a).over(size_of(a)) == size_of(a)
    assert size_of(a * a * b // a) == size_of(a * b) and size_of(a * b // 4).static is None  # a square's width
    assert product([]) == ONE and str(size_of(a * a * 2)) == f"2*{a.node.expr}**2"
    assert not env.guards


@given(st.integers(1, 60), st.integers(1, 60))
def test_division_is_exact_or_none(a: int, b: int) -> None:
    quotient = Size(a).over(Size(b))
    assert quotient == (Size(a // b) if a % b == 0 else None)
    assert (Size(a) * Size(b)).over(Size(b)) == Size(a)


def tensor(axes: Axes, number: int, *sizes: int) -> list[tuple[int, ...]]:
    """The dims of a fresh tensor."""
    dims: list[tuple[int, ...]] = [(axes.new(Size(s)),) for s in sizes]
    axes.occupy(number, [i for d in dims for i in d])
    return dims


def test_split_and_merge() -> None:
    axes = Axes()
    ((n,),) = tensor(axes, 0, 24)
    halves = axes.regroup([n], [Size(2), Size(12)])
    assert [axes.total(h) for h in halves] == [Size(2), Size(12)]
    thirds = axes.regroup([n], [Size(6), Size(4)])  # refines 2 x 12 into 2 x 3 x 4
    assert axes.roots([n]) == (*axes.roots(thirds[0]), *axes.roots(thirds[1]))
    assert [axes.size[i] for i in axes.roots([n])] == [Size(2), Size(3), Size(4)]
    assert axes.roots(halves[1]) == axes.roots([n])[1:]


def test_a_view_across_axes_does_not_fit() -> None:
    axes = Axes()
    dims = tensor(axes, 0, 2, 3)
    flat = [i for d in dims for i in d]
    with pytest.raises(Misfit, match=r"does not split|cuts across"):
        axes.regroup(flat, [Size(3), Size(2)])
    with pytest.raises(Misfit, match="drops axes"):
        axes.regroup(flat, [Size(3)])


def test_unify_splits_the_coarser_side() -> None:
    axes = Axes()
    (a,), (b, c) = tensor(axes, 0, 12)[0], (tensor(axes, 1, 3)[0][0], tensor(axes, 2, 4)[0][0])
    axes.unify([a], [b, c])
    assert axes.roots([a]) == axes.roots([b, c]) and len(axes.roots([a])) == 2
    with pytest.raises(Misfit):
        axes.unify([a], tensor(axes, 3, 5)[0])


def test_one_axis_never_stands_twice_in_a_tensor() -> None:
    """A square weight: its rows and columns stay apart, also where others would make them one."""
    axes = Axes()
    (rows,), (columns,) = tensor(axes, 0, 8, 8)
    with pytest.raises(Misfit, match="two axes of one tensor"):
        axes.unify([rows], [columns])
    (stream,) = tensor(axes, 1, 8)
    axes.unify([rows], stream)
    with pytest.raises(Misfit, match="two axes of one tensor"):
        axes.unify([columns], stream)
    with pytest.raises(Misfit, match="occurs twice"):
        axes.occupy(2, [rows, *stream])


def test_splitting_keeps_axes_apart() -> None:
    """Parts of the two axes of a square weight do not become one either."""
    axes = Axes()
    (rows,), (columns,) = tensor(axes, 0, 8, 8)
    axes.regroup([rows], [Size(2), Size(4)])
    (part,) = tensor(axes, 1, 4)
    axes.unify(axes.roots([rows])[1:], part)
    whole = axes.regroup([columns], [Size(2), Size(4)])
    with pytest.raises(Misfit, match="two axes of one tensor"):
        axes.unify(whole[1], part)


def test_undo_takes_everything_back() -> None:
    axes = Axes()
    (a,), (b,) = tensor(axes, 0, 12)[0], tensor(axes, 1, 12)[0]
    mark = axes.mark()
    axes.regroup([a], [Size(3), Size(4)])
    axes.unify([a], [b])
    axes.occupy(2, [b])
    axes.undo(mark)
    assert axes.roots([a]) == (a,) and axes.roots([b]) == (b,)
    (c,) = tensor(axes, 2, 12)[0]
    axes.unify([b], [c])  # that b was in tensor 2 is forgotten
    axes.unify([a], [b])  # so is the split
    assert axes.roots([a]) == axes.roots([b]) and len(axes.roots([a])) == 1


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, Any]]]:
    """A shape, and views and permutations of it."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    steps: list[tuple[str, Any]] = []
    rank = len(shape)
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            order = draw(st.permutations(range(rank)))
            steps.append(("permute", order))
        else:
            left, target = math.prod(shape), list[int]()
            while left > 1 and len(target) < 4:
                divisor = draw(st.sampled_from(list(sympy.divisors(left))))
                target.append(divisor)
                left //= divisor
            target.append(left)
            steps.append(("view", target))
            rank = len(target)
    return shape, steps


@given(programs())
def test_axes_are_the_digits_of_an_index(program: tuple[list[int], list[tuple[str, Any]]]) -> None:
    """After any views and permutations that fit, a tensor is the first one with its atomic axes in another order."""
    shape, steps = program
    axes = Axes()
    dims: list[tuple[int, ...]] = [() if s == 1 else (axes.new(Size(s)),) for s in shape]
    start = [i for d in dims for i in d]
    value = torch.arange(math.prod(shape)).reshape(shape)
    for step, argument in steps:
        if step == "permute":
            value, dims = value.permute(argument), [dims[i] for i in argument]
            continue
        try:
            dims = list(axes.regroup([i for d in dims for i in d], [Size(s) for s in argument]))
        except Misfit:
            return
        value = value.reshape(argument)
    roots = list(axes.roots(start))
    atoms = torch.arange(math.prod(shape)).reshape([int(str(axes.size[i])) for i in roots])
    order = [roots.index(i) for d in dims for i in axes.roots(d)]
    assert sorted(order) == list(range(len(roots)))
    assert torch.equal(atoms.permute(order).reshape(value.shape), value)
    assert [axes.total(d).static for d in dims] == list(value.shape)
