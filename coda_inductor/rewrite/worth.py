"""What laws pay with: vectors that are sums over a weight, which has to be read for them once more in every call."""

from __future__ import annotations

import math

from coda_inductor.patterns.lift import Lifted, Product
from coda_inductor.patterns.sizes import assumed

LARGE, PASSES = 1 << 24, 3
"""Sums over weights of fewer numbers are worth it in any case, and those over at most so many times as many features as
there are tokens: estimates of a launch, and of what the norm's own pass moves."""


def dear(features: int, inside: int, product: Product) -> bool:
    """Does it take more to read weights [features, inside] than a norm's pass over the tokens of `product` would?"""
    tokens = math.prod(assumed(size) for size in product.node.meta["val"].shape[:-1])
    return features * inside >= LARGE and features > PASSES * tokens


def features_behind(lifted: Lifted, product: Product) -> int:
    """The features of all products that read the operand of `product`: one pass over it serves them all."""
    operand, total = lifted.term[product.x], lifted.reading.axes.total
    readers = (p for p in lifted.products.values() if lifted.term[p.x] is operand)
    return sum(total(p.columns).static or 0 for p in readers)
