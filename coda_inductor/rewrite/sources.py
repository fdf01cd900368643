"""What a vector is made of."""

from __future__ import annotations

from coda_inductor.patterns.terms import Term


def statistics(t: Term) -> list[Term]:
    """The reductions that a vector is made of, through pointwise operations."""
    return [s for s in sources(t) if s.kind == "red"]


def sources(t: Term) -> list[Term]:
    """The reductions and tensors that t is made of, through pointwise operations."""
    found, seen, todo = [], set[Term](), [t]
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.kind in ("red", "leaf"):
            found.append(x)
        elif x.kind != "con":
            todo += x.args
    return sorted(found, key=lambda s: s.id)


def given(t: Term) -> bool:
    """Is t made of tensors alone, of no product that could become a Region?"""
    return not t.deps or (not t.hosts and all(s.kind == "leaf" or given(s.args[0]) for s in sources(t)))


def reductions(t: Term) -> list[Term]:
    """The reductions that t is made of, also inside others."""
    return [r for s in statistics(t) for r in (s, *reductions(s.args[0]))]


def leaves(t: Term) -> list[Term]:
    """The tensors that t is made of, also inside reductions."""
    return [leaf for s in sources(t) for leaf in ([s] if s.kind == "leaf" else leaves(s.args[0]))]
