"""Terms written as an epilogue's statements, as they are: nothing is simplified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from coda_inductor.core.region import Let
from coda_inductor.patterns.terms import Term, Terms, positive

Value = str | float
EXTENTS = ("scalar", "token", "feature", "sample", "table", "tile")


@dataclass(slots=True, kw_only=True)
class Statements(ABC):
    """Those written so far. Who writes says what is loaded, what it varies over, and in which order arguments come."""

    terms: Terms
    lets: list[Let] = field(default_factory=list)
    values: dict[Term, Value] = field(default_factory=dict)

    @abstractmethod
    def given(self, t: Term) -> Value | None:
        """The name under which t is there, None if it is to be written."""

    @abstractmethod
    def extent(self, t: Term) -> str:
        """One of EXTENTS."""

    @abstractmethod
    def rank(self, t: Term) -> tuple[object, ...]:
        """An order of arguments that does not depend on where in the graph a layer stands."""

    @abstractmethod
    def summed(self, t: Term) -> Value:
        """A sum over the columns of each head."""

    def summands(self, t: Term) -> Iterable[tuple[Term, Fraction]]:
        """What a sum adds, with weights."""
        return zip(t.args, t.powers, strict=True)

    def let(self, op: str, *args: Value) -> Value:
        """Appends a statement, or reuses an equal one."""
        for known in self.lets:
            if (known.op, known.args) == (op, args):
                return known.name
        self.lets.append(Let(f"v{len(self.lets)}", op, args))
        return self.lets[-1].name

    def value(self, t: Term) -> Value:
        """The name of t in the epilogue (or its number)."""
        if t not in self.values:
            self.values[t] = self._value(t)
        return self.values[t]

    def _value(self, t: Term) -> Value:
        if (name := self.given(t)) is not None:
            return name
        if t.kind == "mul":
            return self._mul(t)
        if t.kind == "add":
            return self._add(t)
        if t.kind == "red":
            return self.summed(t)
        assert t.kind == "fn", t
        return self.let(t.name, *(self.value(a) for a in t.args))

    def _mul(self, t: Term) -> Value:
        """Vectors are multiplied among themselves before they meet a tile, so that the device may do that once a
        row."""
        ranked = sorted(zip(t.args, t.powers, strict=True), key=lambda bp: self.rank(bp[0]))
        out: Value | None = float(t.coefficient) if t.coefficient not in (1, -1) or not t.args else None
        for base, p in ranked:
            factor = self._power(base, p)
            out = factor if out is None else self.let("mul", out, factor)
        assert out is not None
        return self.let("neg", out) if t.coefficient == -1 and t.args else out

    def _power(self, base: Term, p: Fraction) -> Value:
        if (x := self._logistic(base)) is not None and p < 0 and p.denominator == 1:
            return self._whole(self.let("sigmoid", x), -p.numerator)
        x = self.value(base)
        if p == 1:
            return x
        if p == -1 and self.extent(base) == "token" and positive(base):
            root = self.let("rsqrt", x)  # which the same row mostly needs as well
            return self.let("mul", root, root)
        if p.denominator == 2:
            x, p = self.let("rsqrt" if p < 0 else "sqrt", x), Fraction(abs(p.numerator))
        elif p < 0:
            x, p = self.let("rcp", x), -p
        if p.denominator != 1:
            return self.let("exp", self.let("mul", self.let("log", x), float(p)))
        return self._whole(x, p.numerator)

    def _logistic(self, base: Term) -> Value | None:
        """x if base is 1 + exp(-x), whose reciprocal the device has a better form for."""
        if base.kind != "add" or base.coefficient != 1 or base.powers != (Fraction(1),):
            return None
        e = base.args[0]
        if e.kind != "fn" or e.name != "exp" or e.args[0].kind != "mul" or e.args[0].coefficient >= 0:
            return None
        return self.value(self.terms.mul(self.terms.const(Fraction(-1)), e.args[0]))

    def _whole(self, x: Value, n: int) -> Value:
        """x to the n by squaring."""
        if n == 1:
            return x
        half = self._whole(x, n // 2)
        square = self.let("mul", half, half)
        return self.let("mul", square, x) if n % 2 else square

    def _add(self, t: Term) -> Value:
        out: Value | None = None
        for a, w in sorted(self.summands(t), key=lambda aw: self.rank(aw[0])):
            x = self.value(a)
            if out is not None and w == -1:
                out = self.let("sub", out, x)
                continue
            x = x if w == 1 else self.let("neg", x) if w == -1 else self.let("mul", x, float(w))
            out = x if out is None else self.let("add", out, x)
        assert out is not None
        return self.let("add", out, float(t.coefficient)) if t.coefficient else out
