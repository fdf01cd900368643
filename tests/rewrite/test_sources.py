"""What a vector is made of."""

from __future__ import annotations

from coda_inductor.patterns.terms import Terms
from coda_inductor.rewrite.sources import given, leaves, reductions

ROWS, K, N = 0, 1, 2
EXTENTS = {ROWS: 4, K: 8, N: 8}


def test_what_is_made_of_tensors_alone() -> None:
    """Also of one that waits for a product; but of no product's result, summed or not."""
    terms = Terms()
    weight, condition = terms.leaf("w", (K, N)), terms.leaf("c", (K,), deps=1)
    product = terms.con(terms.leaf("x", (ROWS, K)), weight, (K,), 1)
    vector = terms.red("sum", terms.mul(weight, terms.fn("exp", condition)), (K,), EXTENTS)
    mean = terms.red("sum", product, (ROWS,), EXTENTS)
    assert given(weight) and given(vector) and vector.deps
    assert not given(product) and not given(mean) and not given(terms.mul(vector, terms.fn("exp", mean)))


def test_sums_inside_sums() -> None:
    terms = Terms()
    inner = terms.red("sum", terms.leaf("w", (K, N)), (K,), EXTENTS)
    outer = terms.red("sum", terms.mul(inner, terms.leaf("z", (ROWS, N))), (N,), EXTENTS)
    assert reductions(terms.fn("exp", outer)) == [inner, outer]
    assert {t.name for t in leaves(outer)} == {"w", "z"}


def test_sums_of_many_layers() -> None:
    """Each layer's two sums are made of both of the layer before: 2 ** 60 ways lead to the first."""
    terms = Terms()
    stream = first = terms.leaf("x", (ROWS, K), deps=1)
    for _ in range(60):
        mean = terms.red("sum", stream, (K,), EXTENTS)
        square = terms.red("sum", terms.mul(stream, stream), (K,), EXTENTS)
        stream = terms.mul(terms.mul(stream, mean), terms.fn("rsqrt", square))
    assert len(reductions(stream)) == 120 and leaves(stream) == [first] and given(stream)
