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


def inside(t: Term) -> list[Term]:
    """The reductions and tensors that t is made of, also inside reductions, each once. (Of each layer of a GPT-2 the
    mean and the variance are made of those of the layer before: there are two ways to each, of twelve layers 2 ** 24.)
    """
    found, seen, todo = list[Term](), set[Term](), sources(t)
    while todo:
        s = todo.pop()
        if s not in seen:
            seen.add(s)
            found.append(s)
            todo += sources(s.args[0]) if s.kind == "red" else []
    return sorted(found, key=lambda s: s.id)


def given(t: Term) -> bool:
    """Is t made of tensors alone, of no product that could become a Region?"""
    return not t.deps or not any(x.hosts and x.deps for x in (t, *(s.args[0] for s in inside(t) if s.kind == "red")))


def reductions(t: Term) -> list[Term]:
    """The reductions that t is made of, also inside others."""
    return [s for s in inside(t) if s.kind == "red"]


def leaves(t: Term) -> list[Term]:
    """The tensors that t is made of, also inside reductions."""
    return [s for s in inside(t) if s.kind == "leaf"]
