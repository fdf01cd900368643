"""A tile configuration: how a kernel divides its matrix.

Which of them are worth timing on a machine says target.py; in which a Region can run, legality.py.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple


class Config(NamedTuple):
    """A tile of `tile_m` x `tile_n` accumulators per block, `cluster_m` x `cluster_n` blocks sharing loads.

    `pingpong`: two warp groups take turns on tiles (epilogue of one under the mainloop of the other) instead of halving
    one tile. `order` "n" walks the epilogue's subtiles along N first whatever the operands prefer: it frees registers
    in epilogues with feature vectors and costs them in others (most in sums over M, of which it keeps every column at
    hand until the last rows), so both are timed. `turned`: the kernel multiplies B^T A^T, whose tile of `tile_m` rows
    is `tile_m` columns of the Region's, so that other sizes are divided well. For a product with nothing beside it.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    order: Literal["auto", "n"] = "auto"
    turned: bool = False

    def __str__(self) -> str:
        kind = "pp" if self.pingpong else "co"
        order = "" if self.order == "auto" else "n"
        turned = "t" if self.turned else ""
        return f"{self.tile_m}x{self.tile_n}{kind}{self.cluster_m}x{self.cluster_n}{order}{turned}"

    @classmethod
    def read(cls, fields: Any) -> Config | None:
        """The configuration of a record, which may be older than some fields; None if it is none."""
        known, late = set(cls._fields), set(cls._field_defaults)
        if not isinstance(fields, dict) or not known - late <= set(fields) <= known:
            return None
        return cls(**fields)


def tiles(text: str) -> tuple[Config, ...]:
    """The configurations that `text` lists as they are printed."""
    found = re.findall(r"(\d+)x(\d+)(pp|co)(\d+)x(\d+)(n?)(t?)", text)
    made = [
        Config(int(m), int(n), int(i), int(j), p == "pp", "n" if o else "auto", t == "t")
        for m, n, p, i, j, o, t in found
    ]
    assert " ".join(map(str, made)) == text, text
    return tuple(made)
