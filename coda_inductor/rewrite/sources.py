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


def leaves(t: Term) -> list[Term]:
    """The tensors that t is made of, also inside reductions."""
    return [leaf for s in sources(t) for leaf in ([s] if s.kind == "leaf" else leaves(s.args[0]))]
