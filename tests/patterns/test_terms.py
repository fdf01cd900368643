"""Terms: whatever the constructors normalise, the value stays, NaNs included; equal terms are one object."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coda_inductor.core.ops import OPS
from coda_inductor.patterns.terms import Term, Terms, nonnegative, positive, show

VALUES = torch.tensor([-3.0, -1.5, -0.5, 0.25, 1.0, 2.0, 7.0], dtype=torch.float64)
GRID = dict(zip("abc", torch.cartesian_prod(VALUES, VALUES, VALUES).T, strict=True))
POWERS = [Fraction(p) for p in ("-2", "-1", "-1/2", "1/2", "1", "3/2", "2", "3")]

Expression = tuple[Any, ...]
"""("leaf", name), ("number", c), ("mul", x, y), ("add", x, y), ("power", x, p) or ("fn", x, name)."""


def grow(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.tuples(st.sampled_from(["mul", "add"]), inner, inner),
        st.tuples(st.just("power"), inner, st.sampled_from(POWERS)),
        st.tuples(st.just("fn"), inner, st.sampled_from(["exp", "tanh", "abs"])),
    )


expressions = st.recursive(
    st.one_of(
        st.tuples(st.just("leaf"), st.sampled_from("abc")),
        st.tuples(st.just("number"), st.sampled_from([-2.0, -1.0, 0.5, 3.0])),
    ),
    grow,
    max_leaves=8,
)


def term(ts: Terms, e: Expression) -> Term:
    """The expression through the constructors. 0 ** -1 raises ZeroDivisionError."""
    kind, x, *more = e
    if kind == "leaf":
        return ts.leaf(x, [0])
    if kind == "number":
        return ts.const(x)
    if kind == "power":
        return ts.power(term(ts, x), more[0])
    if kind == "fn":
        return ts.fn(more[0], term(ts, x))
    return (ts.mul if kind == "mul" else ts.add)(term(ts, x), term(ts, more[0]))


def plain(e: Expression, leaves: dict[str, Tensor], seen: list[Tensor]) -> Tensor:
    """The expression as written; every intermediate value is appended to `seen`."""
    kind, x, *more = e
    if kind == "leaf":
        out = leaves[x]
    elif kind == "number":
        out = torch.full_like(leaves["a"], x)
    elif kind == "power":
        out = power(plain(x, leaves, seen), more[0])
    elif kind == "fn":
        out = OPS[more[0]].torch(plain(x, leaves, seen))
    else:
        out = (torch.mul if kind == "mul" else torch.add)(plain(x, leaves, seen), plain(more[0], leaves, seen))
    seen.append(out)
    return out


def value(t: Term, leaves: dict[str, Tensor]) -> Tensor:
    """A pointwise term on values of its leaves."""
    if t.kind == "leaf":
        return leaves[t.name]
    args = [value(a, leaves) for a in t.args]
    if t.kind == "fn":
        return OPS[t.name].torch(*args)
    out = torch.full_like(leaves["a"], float(t.coefficient))
    for a, p in zip(args, t.powers, strict=True):
        out = out * power(a, p) if t.kind == "mul" else out + float(p) * a
    return out


def power(x: Tensor, p: Fraction) -> Tensor:
    """x ** p as ATen spells it."""
    spelled: dict[Fraction, Callable[[Tensor], Tensor]] = {Fraction(1, 2): torch.sqrt, Fraction(-1, 2): torch.rsqrt}
    return spelled[p](x) if p in spelled else x ** float(p)


@settings(max_examples=500)
@given(expressions)
def test_normalising_keeps_the_value(e: Expression) -> None:
    """Where the original neither overflows nor cancels the value is the same, and a NaN stays one."""
    ts, seen = Terms(), list[Tensor]()
    try:
        t = term(ts, e)
    except ZeroDivisionError:  # 0 ** -1
        return
    wanted, found = plain(e, GRID, seen), value(t, GRID)
    near = plain(e, {n: x * (1 + 1e-13) for n, x in GRID.items()}, [])
    tame = torch.stack([x.isnan() | ((x.abs() < 1e50) & (x.abs() > 1e-50)) for x in seen]).all(0)
    tame &= (near.isnan() & wanted.isnan()) | ((near - wanted).abs() <= 1e-9 * wanted.abs())
    torch.testing.assert_close(
        found[tame], wanted[tame], rtol=1e-6, atol=0, equal_nan=True, msg=lambda m: f"{show(t)}: {m}"
    )


@settings(max_examples=300)
@given(expressions)
def test_what_is_called_positive_is(e: Expression) -> None:
    ts = Terms()
    try:
        t = term(ts, e)
    except ZeroDivisionError:
        return
    found = value(t, GRID)
    assert not (positive(t) or nonnegative(t)) or not bool((found < 0).any())  # exp(-800) rounds to 0


@settings(max_examples=200)
@given(expressions)
def test_rebuilding_and_repeating_give_the_same_object(e: Expression) -> None:
    ts = Terms()
    try:
        assert term(ts, e) is term(ts, e)
    except ZeroDivisionError:
        return
    assert all(ts.rebuild(t, t.args) is t for t in ts if t.args)
    assert [t.id for t in ts] == list(range(len(list(ts))))


def leaves(ts: Terms, *names: str) -> list[Term]:
    return [ts.leaf(n, [0]) for n in names]


def test_spellings_fall_together() -> None:
    ts = Terms()
    (x,) = leaves(ts, "x")
    v = ts.add(ts.red("sum", ts.power(x, Fraction(2)), [0], {0: 8}), ts.const(1e-5))
    root = ts.power(v, Fraction(-1, 2))
    assert positive(v)
    assert ts.power(ts.power(v, Fraction(1, 2)), Fraction(-1)) is root
    assert ts.mul(v, ts.power(v, Fraction(-3, 2))) is root
    assert ts.mul(root, root, root) is ts.power(v, Fraction(-3, 2))
    assert ts.mul(v, ts.power(v, Fraction(-1))) is ts.const(1.0)


def test_domains_are_kept() -> None:
    ts = Terms()
    (x,) = leaves(ts, "x")
    half, one = Fraction(1, 2), ts.const(1.0)
    assert ts.mul(x, ts.power(x, Fraction(-1))) is not one  # x may be 0
    assert ts.mul(ts.power(x, half), ts.power(x, half)) is not x  # x may be negative
    assert ts.power(ts.power(x, Fraction(2)), half) is not x
    assert ts.power(ts.power(x, half), Fraction(2)) is not x


def test_literals_are_shortest_decimals() -> None:
    ts = Terms()
    assert ts.const(1e-5).coefficient == Fraction(1, 100000)
    assert ts.const(0.1 + 0.2) is not ts.const(0.3)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(ValueError):
            ts.const(bad)


def test_sums_stay_as_they_are_written() -> None:
    ts = Terms()
    x, y, z = leaves(ts, "x", "y", "z")
    stream = ts.add(x, y)
    assert set(ts.add(stream, z).args) == {z, stream}
    assert ts.add(x, x) is ts.mul(ts.const(2.0), x)  # exact
    rounded = ts.add(x, ts.const(12582912.0))
    assert ts.add(rounded, ts.const(-12582912.0)).args == (rounded,)
    assert ts.add(ts.add(x, ts.const(1.0)), ts.const(2.0)) is not ts.add(x, ts.const(3.0))


@pytest.mark.parametrize(("first", "second"), [(1, -1), (1, 3), (-2, 2), (3, 1)])
def test_like_terms_neither_merge_nor_cancel(first: int, second: int) -> None:
    ts = Terms()
    (x,) = leaves(ts, "x")
    a, b = ts.mul(ts.const(float(first)), x), ts.mul(ts.const(float(second)), x)
    both = ts.add(a, b)
    assert both.kind == "add" and len(both.args) == 2
    assert ts.rebuild(both, both.args) is both
    assert ts.add(a, b, merge=True) is ts.mul(ts.const(float(first + second)), x)  # in laws alone


def test_a_sum_of_like_terms_is_one_term_in_any_order() -> None:
    ts = Terms()
    a, b = leaves(ts, "a", "b")
    twice, thrice = (ts.mul(ts.const(n), a, b) for n in (2.0, -3.0))
    both = ts.add(twice, thrice)
    assert ts.add(thrice, twice) is both and ts.rebuild(both, both.args) is both
    assert ts.add(a, a, ts.mul(ts.const(2.0), a)) is ts.mul(ts.const(4.0), a)


def test_numbers_leave_a_sum_where_that_rounds_nothing() -> None:
    x = (strict := Terms(rounding=True)).leaf("x", [0, 1])
    for number, leaves_it in ((3.0, False), (0.25, True), (-2.0, True)):
        red = strict.red("sum", strict.mul(strict.const(number), x), [0], {0: 5})
        assert (red.kind == "mul") == leaves_it


def test_a_sum_over_what_does_not_vary_counts() -> None:
    ts = Terms()
    r, x = ts.leaf("r", [1]), ts.leaf("x", [0, 1])
    assert ts.red("sum", r, [0], {0: 5}) is ts.mul(ts.const(5.0), r)
    assert ts.red("max", r, [0], {0: 5}) is r
    assert ts.red("sum", ts.mul(ts.const(3.0), x), [0], {0: 5}) is ts.mul(ts.const(3.0), ts.red("sum", x, [0], {0: 5}))
    assert ts.red("max", ts.mul(ts.const(-3.0), x), [0], {0: 5}).args[0].coefficient == -3  # max does not scale so


def test_lanes_select_what_they_were_made_of() -> None:
    ts = Terms()
    x = ts.leaf("x", [0, 1])
    both = [ts.select(x, 1, i) for i in (0, 1)]
    assert both[0] is not both[1] and all(1 not in t.axes for t in both)
    whole = ts.cat([1], {1: 2}, [ts.power(b, Fraction(2)) for b in both])
    assert 1 in whole.axes
    picked = ts.select(ts.mul(whole, x), 1, 1)
    assert picked is ts.mul(ts.power(both[1], Fraction(2)), both[1])
    nested = ts.cat([1, 2], {1: 2, 2: 2}, [ts.const(float(i)) for i in range(4)])
    assert [ts.select(ts.select(nested, 1, i), 2, j).coefficient for i in (0, 1) for j in (0, 1)] == [0, 1, 2, 3]


def test_what_waits_for_a_product() -> None:
    ts = Terms()
    x, w = ts.leaf("x", [0, 1]), ts.leaf("w", [1, 2])
    acc = ts.con(x, w, [1], 0)
    total = ts.red("sum", ts.power(acc, Fraction(2)), [2], {2: 4})
    later = ts.con(ts.mul(acc, total), ts.leaf("v", [2, 3]), [2], 1)
    assert acc.axes == {0, 2} and later.axes == {0, 3}
    assert (acc.deps, acc.hosts, total.deps, total.hosts) == (1, 1, 1, 0)
    assert (later.deps, later.hosts, later.bit) == (3, 2, 1)
    assert ts.leaf("opaque", [0], deps=3).hosts == 0


def test_show_is_one_line_at_any_depth() -> None:
    ts = Terms()
    (x,) = leaves(ts, "x")
    for i in range(30):
        x = ts.fn("tanh", ts.add(x, ts.leaf(f"y{i}", [0])))
    text = show(x)
    assert "\n" not in text and len(text) < 400 and "%" in text
    assert show(x, names={x: "h"}) == "h" == show(x, 0, {x: "h"})
    assert repr(x) == text
