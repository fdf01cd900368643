"""The smallest legal Region, and one of two products, with any of their fields replaced."""

from __future__ import annotations

from typing import Any

from coda_inductor.core.region import Product, Region, Store


def small(**changes: Any) -> Region:
    """A legal Region with some fields replaced."""
    fields: dict[str, Any] = {
        "n": 256, "dtype": "bf16", "products": (Product("acc", 0, 1, 64, "nk"),), "operands": (),
        "lets": (), "stores": (Store("acc", "bf16"),), "reductions": (),
    }  # fmt: skip
    return Region(**(fields | changes))


def two(**changes: Any) -> Region:
    lanes = {"products": (Product("g", 0, 1, 64, "nk"), Product("u", 0, 2, 64, "nk")), "stores": (Store("g", "bf16"),)}
    return small(**(lanes | changes))
