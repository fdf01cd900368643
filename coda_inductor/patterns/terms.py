"""Terms: what a value is, as a function of its axes. Hash-consed, so that equal terms are one object.

A term knows nothing of layout: views, permutes, expands and casts have vanished. Products carry rational powers,
which is how all spellings of rsqrt, division and sigmoid fall together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import torch

from coda_inductor.core.dtypes import ROUNDED

Kind = Literal["leaf", "mul", "add", "fn", "con", "red", "lanes"]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One node. Equality is identity: terms are made by Terms only.

    leaf   `name`: a tensor of the graph, at fixed `lanes` ((axis, index), ...).
    mul    coefficient * product of args[i] ** powers[i].
    add    coefficient + sum of powers[i] * args[i].
    fn     the pointwise operation `name` of args.
    con    sum over the axes `over` of args[0] * args[1]: a matrix product, at fixed `lanes` of its columns.
    red    the reduction `name` ("sum", "max", "logsumexp") of args[0] over the axes `over`.
    lanes  args[i] at the i-th index of the one axis `over`.
    """

    id: int
    kind: Kind
    name: str
    args: tuple[Term, ...]
    coefficient: Fraction
    powers: tuple[Fraction, ...]
    over: tuple[int, ...]
    lanes: tuple[tuple[int, int], ...]
    axes: frozenset[int] = field(repr=False)
    deps: int = field(repr=False)  # bit set of the products that must have run before this is known
    hosts: int = field(repr=False)  # bit set of the products reached without crossing a reduction or another product
    sign: int = field(repr=False)  # 2: positive wherever it is finite; 1: not negative; 0: not known

    def __repr__(self) -> str:
        return show(self)

    @property
    def bit(self) -> int:
        """Of a contraction: the number of the product that computes it."""
        return self.hosts.bit_length() - 1


ZERO, ONE = Fraction(0), Fraction(1)


class Terms:
    """The table of all terms of a graph, and their constructors, which normalise."""

    def __init__(self, rounding: bool = False) -> None:
        self.rounding = rounding
        """Do terms keep every rounding of the original? Then only powers of two leave a sum."""
        self._table: dict[object, Term] = {}
        self._selected: dict[tuple[Term, int, int], Term] = {}
        self._products: dict[tuple[Term, ...], Term] = {}  # a graph is derived many times, each time much alike
        self._rebuilt: dict[tuple[Term, ...], Term] = {}

    def __iter__(self) -> Iterator[Term]:
        """All terms so far, arguments before their users."""
        return iter(list(self._table.values()))

    def _make(
        self, kind: Kind, name: str = "", args: tuple[Term, ...] = (), coefficient: Fraction = ONE,
        powers: tuple[Fraction, ...] = (), over: tuple[int, ...] = (), lanes: tuple[tuple[int, int], ...] = (),
        axes: frozenset[int] | None = None, deps: int = 0, hosts: int = 0,
    ) -> Term:  # fmt: skip
        key = (kind, name, args, coefficient, powers, over, lanes)
        if (found := self._table.get(key)) is not None:
            return found
        deps |= hosts
        for a in args:
            deps |= a.deps
            hosts |= 0 if kind in ("red", "con") else a.hosts
        if axes is None:
            axes = frozenset().union(*(a.axes for a in args))
            axes = axes | set(over) if kind == "lanes" else axes - set(over)
        sign = _sign(kind, name, args, coefficient, powers)
        term = Term(len(self._table), kind, name, args, coefficient, powers, over, lanes, axes, deps, hosts, sign)
        self._table[key] = term
        return term

    def leaf(self, name: str, axes: Iterable[int], deps: int = 0, lanes: tuple[tuple[int, int], ...] = ()) -> Term:
        """A tensor of the graph; `deps` are the contractions that it waits for."""
        return self._make("leaf", name, lanes=lanes, axes=frozenset(axes) - {a for a, _ in lanes}, deps=deps)

    def const(self, value: float | Fraction) -> Term:
        """A number; floats by their shortest decimal, so that 1e-05 is 1/100000."""
        if not isinstance(value, Fraction):
            value = Fraction(str(float(value)))  # inf and nan raise ValueError: the caller leaves such nodes opaque
        return self._make("mul", coefficient=value)

    def mul(self, *args: Term) -> Term:
        """The product, flat; equal bases merge where that changes no domain."""
        if (found := self._products.get(args)) is None:
            found = self._products[args] = self._mul(args)
        return found

    def _mul(self, args: tuple[Term, ...]) -> Term:
        coefficient, powers = ONE, dict[tuple[Term, bool], Fraction]()
        for a in args:
            pairs = zip(a.args, a.powers, strict=True) if a.kind == "mul" else [(a, ONE)]
            coefficient *= a.coefficient if a.kind == "mul" else ONE
            for base, p in pairs:
                key = (base, p > 0 or positive(base))  # x * x**-1 stays as it is, unless x > 0
                if key in powers and p.denominator > 1 and not positive(base):
                    key = (self._make("mul", args=(base,), powers=(p,)), True)  # sqrt(x) * sqrt(x) is not x for x < 0
                    p = ONE
                powers[key] = powers.get(key, ZERO) + p
        pairs = sorted(((b, p) for (b, _), p in powers.items() if p), key=lambda bp: (bp[0].id, bp[1]))
        if coefficient == 0:
            return self.const(ZERO)
        if len(pairs) == 1 and pairs[0][1] == 1 and coefficient == 1:
            return pairs[0][0]
        return self._make(
            "mul", args=tuple(b for b, _ in pairs), coefficient=coefficient, powers=tuple(p for _, p in pairs)
        )

    def power(self, x: Term, p: Fraction) -> Term:
        """x ** p. (x ** q) ** p merges where that changes no domain."""
        if p == 1 or (x.kind == "mul" and not x.args and p == ZERO):
            return x if p == 1 else self.const(ONE)
        if x.kind == "mul":
            whole = all(positive(b) or (p.denominator == 1 and (q.denominator == 1 or nonnegative(b)))
                        for b, q in zip(x.args, x.powers, strict=True))  # fmt: skip
            root = _root(x.coefficient, p)
            if whole and root is not None:
                factors = [self._make("mul", args=(b,), powers=(q * p,)) if q * p != 1 else b
                           for b, q in zip(x.args, x.powers, strict=True)]  # fmt: skip
                return self.mul(self.const(root), *factors)
        return self._make("mul", args=(x,), powers=(p,))

    def add(self, *args: Term, signs: Sequence[Fraction] | None = None, merge: bool = False) -> Term:
        """The sum of signs[i] * args[i], in float32 what the user wrote: an addend that is a sum stays one value, and
        like terms meet only as x + x = 2 x. (x + c) - c is a rounding of x to a multiple of c's last bit, and
        (s - x) - y the rounding error of s = x + y. `merge`: laws with an error bound let like terms meet and cancel.
        """
        total, found = ZERO, dict[Term, list[Fraction]]()
        for a, sign in zip(args, signs or [ONE] * len(args), strict=True):
            if is_number(a):
                total += sign * a.coefficient
                continue
            t, w = (self.mul(a, self.const(1 / a.coefficient)), sign * a.coefficient) if _scaled(a) else (a, sign)
            found.setdefault(t, []).append(w)
        weights = dict[Term, Fraction]()
        for t, own in found.items():
            apart = [sum(own, ZERO)] if merge else _doubled(own)
            for w in apart:
                whole = len(apart) == 1 or w == 1
                weights[t if whole else self.mul(self.const(w), t)] = w if whole else ONE
        pairs = sorted(((t, w) for t, w in weights.items() if w), key=lambda tw: tw[0].id)
        if not pairs:
            return self.const(total)
        if total == 0 and len(pairs) == 1:
            return self.mul(self.const(pairs[0][1]), pairs[0][0])
        return self._make("add", args=tuple(t for t, _ in pairs), coefficient=total, powers=tuple(w for _, w in pairs))

    def fn(self, name: str, *args: Term) -> Term:
        """A pointwise function that the algebra does not look into. Rounding twice is rounding once, and a rounded
        number is a number."""
        if name in ROUNDED and args[0].kind == "fn" and args[0].name == name:
            return args[0]
        if name in ROUNDED and is_number(args[0]):
            value = float(torch.tensor(float(args[0].coefficient), dtype=torch.float64).to(ROUNDED[name]))
            return self.const(Fraction(value)) if math.isfinite(value) else self._make("fn", name, args)
        return self._make("fn", name, args)

    def con(self, a: Term, b: Term, over: Iterable[int], bit: int, lanes: tuple[tuple[int, int], ...] = ()) -> Term:
        """The contraction of a and b over the axes; `bit` says which product of the graph computes it."""
        return self._make("con", args=(a, b), over=tuple(sorted(over)), lanes=lanes, hosts=1 << bit)

    def red(self, name: str, x: Term, over: Iterable[int], extents: dict[int, int]) -> Term:
        """A reduction; a sum over axes that x does not vary over multiplies by their `extents`."""
        over = tuple(sorted(over))
        inside = tuple(i for i in over if i in x.axes)
        if name == "sum":
            for i in over:
                x = x if i in x.axes else self.mul(x, self.const(extents[i]))
            if x.kind == "mul" and not (self.rounding and _rounds(x.coefficient)):  # numbers leave a sum
                outside = self.const(x.coefficient)
                inner = self.mul(x, self.const(1 / x.coefficient)) if x.coefficient else x
                return self.mul(outside, self._make("red", name, (inner,), over=inside)) if inside else x
        return self._make("red", name, (x,), over=inside) if inside else x

    def cat(self, over: Sequence[int], extents: dict[int, int], parts: Sequence[Term]) -> Term:
        """The value whose i-th lane is parts[i], i counting the axes `over` (of `extents`), major to minor."""
        if not over:
            return parts[0]
        inner = len(parts) // extents[over[0]]
        lanes = [self.cat(over[1:], extents, parts[i : i + inner]) for i in range(0, len(parts), inner)]
        return self._make("lanes", args=tuple(lanes), over=(over[0],))

    def rebuild(self, t: Term, args: Sequence[Term]) -> Term:
        """t with other arguments, through the constructors."""
        key = (t, *args)
        if (found := self._rebuilt.get(key)) is None:
            found = self._rebuilt[key] = self._rebuild(t, args)
        return found

    def _rebuild(self, t: Term, args: Sequence[Term]) -> Term:
        if t.kind == "mul":
            factors = [self.power(a, p) for a, p in zip(args, t.powers, strict=True)]
            return self.mul(self.const(t.coefficient), *factors)
        if t.kind == "add":
            return self.add(self.const(t.coefficient), *args, signs=[ONE, *t.powers])
        if t.kind == "fn":
            return self.fn(t.name, *args)
        if t.kind == "con":
            return self.con(args[0], args[1], over=t.over, bit=t.bit, lanes=t.lanes)
        if t.kind in ("red", "lanes"):
            return self._make(t.kind, t.name, tuple(args), over=t.over)
        return t

    def select(self, t: Term, axis: int, index: int) -> Term:
        """t at one index of an axis (of a few lanes); pushed down to the leaves."""
        todo = [t]
        while todo:
            x = todo[-1]
            if (x, axis, index) in self._selected:
                todo.pop()
            elif axis not in x.axes:
                self._selected[todo.pop(), axis, index] = x
            elif x.kind == "leaf":
                lanes = tuple(sorted((*x.lanes, (axis, index))))
                self._selected[todo.pop(), axis, index] = self.leaf(
                    x.name, x.axes | {a for a, _ in lanes}, x.deps, lanes
                )
            elif missing := [a for a in x.args if (a, axis, index) not in self._selected]:
                todo += missing
            else:
                self._selected[todo.pop(), axis, index] = self._select(x, axis, index)
        return self._selected[t, axis, index]

    def _select(self, x: Term, axis: int, index: int) -> Term:
        args = [self._selected[a, axis, index] for a in x.args]
        if x.kind == "lanes" and axis in x.over:
            return args[index]
        if x.kind == "con":
            return self.con(args[0], args[1], over=x.over, bit=x.bit, lanes=tuple(sorted((*x.lanes, (axis, index)))))
        return self.rebuild(x, args)


def _doubled(weights: list[Fraction]) -> list[Fraction]:
    """Equal weights two by two as one of twice the size, until all differ: w x + w x rounds nothing."""
    found = sorted(weights)
    while (twice := next((w for w, v in itertools.pairwise(found) if w == v), None)) is not None:
        found.remove(twice)
        found.remove(twice)
        found = sorted([*found, 2 * twice])
    return found


def _rounds(c: Fraction) -> bool:
    """May a product with c round? With a power of two it does not."""
    return c != 0 and any(n & (n - 1) for n in (abs(c.numerator), c.denominator))


def _root(c: Fraction, p: Fraction) -> Fraction | None:
    """c ** p if that is a rational number."""
    if p.denominator == 1:
        return c**p.numerator if c else None
    return c if c == 1 else None


def is_number(t: Term) -> bool:
    """Is t a literal?"""
    return t.kind == "mul" and not t.args


def _scaled(t: Term) -> bool:
    """Is t a number times something?"""
    return t.kind == "mul" and t.coefficient != 1


def positive(t: Term) -> bool:
    """Is t > 0 wherever it is finite? Sound, not complete: sums of squares plus eps, exp, sigmoid's 1 + exp(-x)."""
    return t.sign == 2


def nonnegative(t: Term) -> bool:
    """Is t >= 0? Sound, not complete."""
    return t.sign >= 1


def _sign(kind: Kind, name: str, args: tuple[Term, ...], coefficient: Fraction, powers: tuple[Fraction, ...]) -> int:
    """As Term has it, of the arguments' own: in a chain of norms each reads the one before twice."""
    if kind == "mul":
        if coefficient > 0 and all(a.sign == 2 for a in args):
            return 2
        even = all(a.sign or (p.denominator == 1 and p.numerator % 2 == 0) for a, p in zip(args, powers, strict=True))
        return int(coefficient >= 0 and even)
    if kind == "add":
        return 2 if coefficient > 0 and all(w > 0 and a.sign for a, w in zip(args, powers, strict=True)) else 0
    if kind == "red":
        return min(args[0].sign, 1)
    return (2 if name in ("exp", "sigmoid") else int(name == "abs")) if kind == "fn" else 0


def show(t: Term, depth: int = 6, names: Mapping[Term, str] = MappingProxyType({})) -> str:
    """One line; what is among `names` is called by its name, and deep arguments become %id."""
    if t in names:
        return names[t]
    if depth == 0 and t.args:
        return f"%{t.id}"
    args = [show(a, depth - 1, names) for a in t.args]
    if t.kind == "leaf":
        return t.name + "".join(f"[{i}]" for _, i in t.lanes)
    if t.kind == "mul":
        factors = [a if p == 1 else f"{a}^{p}" for a, p in zip(args, t.powers, strict=True)]
        number = [] if t.coefficient == 1 and factors else [_number(t.coefficient)]
        return "*".join(number + factors)
    if t.kind == "add":
        words = [a if w == 1 else f"{_number(w)}*{a}" for a, w in zip(args, t.powers, strict=True)]
        return "(" + " + ".join(([_number(t.coefficient)] if t.coefficient else []) + words) + ")"
    if t.kind == "con":
        return f"({args[0]} @ {args[1]})"
    if t.kind == "red":
        return f"{t.name}[{args[0]}]"
    return f"{t.name or t.kind}({', '.join(args)})"


def _number(c: Fraction) -> str:
    return str(c.numerator) if c.denominator == 1 else f"{float(c):.6g}"
