"""Deriving: the laws applied to every term, on demand. Only what is late is rewritten.

A product and its epilogue are one moment; a sum over that epilogue is known just after. A matrix operand that needs such a
sum of its own producer is late: it could only be made by a pass of its own. Bilinearity takes the late factors out of the
product, and the gauge makes all products that read the operand agree on the one scaling that is stored.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.laws import BILINEARITY, GAUGE
from coda_inductor.rewrite.program import Program


@dataclass(frozen=True, slots=True)
class Firing:
    """One use of a law: the terms before and after are equal, which tests check in float64. `product` is a bit."""

    law: str
    before: Term
    after: Term
    product: int


def derive(program: Program, laws: frozenset[str]) -> list[Firing]:
    """Fills program.new and program.nodes; returns what fired. `laws` are the names of those that may."""
    firings: list[Firing] = []
    held: dict[Term, list[fx.Node]] = defaultdict(list)
    for node, term in program.lifted.term.items():
        held[term].append(node)
    readers: dict[Term, int] = defaultdict(int)
    terms = program.lifted.terms
    for t in terms:
        if t.kind == "con":
            readers[t.args[0]] |= t.hosts
    for t in terms:
        after = terms.rebuild(t, [program.new[a] for a in t.args]) if t.args else t
        if t.kind == "con" and BILINEARITY.name in laws and not _undeferred(program, readers[t.args[0]], laws):
            before, after = after, defer(program, after)
            if after is not before:
                firings.append(Firing(BILINEARITY.name, before, after, t.bit))
        program.new[t] = after
        program.nodes.setdefault(after, []).extend(held[t])
    return firings


def _undeferred(program: Program, readers: int, laws: frozenset[str]) -> bool:
    """Must this operand stay as it is? By the gauge all its readers agree; without it, deferral needs a single reader."""
    if GAUGE.name not in laws and readers.bit_count() > 1:
        return True
    return any(readers >> bit & 1 for bit in program.undeferred)


def late_factors(con: Term) -> list[Term]:
    """The factors of a product's left operand that do not vary over the summed axes, but wait for the operand's own producer."""
    x = con.args[0]
    factors = [x] if x.kind != "mul" else list(x.args)
    return [f for f in factors if f.deps & x.hosts and not f.hosts & x.hosts and not f.axes.intersection(con.over)]


def defer(program: Program, con: Term) -> Term:
    """sum_k (r x)_k w_k = r sum_k x_k w_k for the late factors r, if the rest can then leave its producer's epilogue."""
    terms, x, late = program.lifted.terms, con.args[0], late_factors(con)
    if not late:
        return con
    r, rest = terms.const(1.0), terms.const(x.coefficient)
    for factor, p in zip(x.args, x.powers, strict=True):
        if factor in late:
            r = terms.mul(r, terms.power(factor, p))
        else:
            rest = terms.mul(rest, terms.power(factor, p))
    try:
        space = program.space(rest)
        program.check(rest, space)
        if (product := program.product(con)).rows != space.rows or _contracted(program, con) != space.columns:
            raise Unsupported(f"the operand of {product.node} is laid out otherwise than its producer's tile")
        for factor in late:
            for s in statistics(factor):
                own = program.space(s.args[0])
                program.check(s.args[0], own)
                if s.name != "sum" or set(s.over) != set(own.columns) or not s.axes <= set(own.rows):
                    raise Unsupported("the statistic is no sum over the row of one product")
    except Unsupported:
        return con
    return terms.mul(r, terms.con(rest, con.args[1], con.over, con.bit, con.lanes))


def _contracted(program: Program, con: Term) -> tuple[int, ...]:
    return program.lifted.reading.roots(program.product(con).x)[-1]


def statistics(t: Term) -> list[Term]:
    """The reductions that a vector is made of, through pointwise operations."""
    found, seen, todo = [], set[Term](), [t]
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.kind == "red":
            found.append(x)
        elif x.kind != "con":
            todo += x.args
    return sorted(found, key=lambda s: s.id)
