"""The tile configurations: how a kernel divides its matrix, and which divisions are worth timing. Facts only.

Which of them a Region can run in, and which table it gets, says legality.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Config(NamedTuple):
    """A tile of `tile_m` x `tile_n` accumulators per block, `cluster_m` x `cluster_n` blocks sharing loads.

    `pingpong`: two warp groups take turns on tiles (epilogue of one under the mainloop of the other) instead of halving
    one tile. `order` "n" walks the epilogue's subtiles along N first whatever the operands prefer: it frees registers
    in epilogues with feature vectors and costs them in others (most in sums over M, of which it keeps every column at
    hand until the last rows), so both are timed.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    order: Literal["auto", "n"] = "auto"

    def __str__(self) -> str:
        kind = "pp" if self.pingpong else "co"
        order = "" if self.order == "auto" else "n"
        return f"{self.tile_m}x{self.tile_n}{kind}{self.cluster_m}x{self.cluster_n}{order}"


# For each of 13 Regions one of these is within 1.5 % of the best of 8 to 15 (mean of both times, H200, bench/tiles.py).
# 160 columns are for widths that neither 128 nor 192 divides; 208 in their place are 1 to 11 % faster with a residual
# or a norm's scale, but were the fastest of no kernel that was kept in seven models. What runs untuned is the first: it
# has registers left.
LARGE = (
    Config(128, 256, 2, 1, False),
    Config(128, 192, 2, 1, True, "n"),
    Config(128, 128, 1, 2, True),
    Config(128, 160, 2, 1, True),
    Config(128, 192, 2, 1, True),
    Config(128, 128, 2, 1, True),
)
# Of width DEEP_LEAST and over sums as deep a larger tile, which reads less, is 1 to 2 % faster under a load that lasts.
DEEP = (
    LARGE[0],
    Config(256, 192, 2, 1, False, "n"),
    Config(256, 192, 1, 2, False),
    *(c for c in LARGE[1:] if c.tile_n > 128),
)
DEEP_LEAST = 8192
# Of DEEP_LEAST and more in all three sizes, with nothing beside: one of these takes 2 to 6 % less than cuBLAS to write
# 16 bits, and about as long to 4 % less for 32 (H200, bench/results/tiles.jsonl).
PLAIN = (Config(256, 192, 2, 1, False), Config(256, 192, 1, 2, False), Config(128, 192, 2, 1, True))
HEAVY = (  # two tile operands and more: the tiles that spill least come first
    Config(128, 128, 1, 2, True),
    Config(128, 128, 2, 1, True),
    Config(128, 160, 2, 1, True),
    *(c for c in LARGE if (c.tile_m, c.tile_n) not in ((128, 128), (128, 160))),
)
HEADS = (  # halves of heads: 128x256 took 7 to 20 % longer (bench/results/rotary.jsonl), 192 rows -1 to +13 %
    Config(128, 128, 1, 2, True),
    Config(128, 128, 2, 1, True),
    Config(192, 128, 1, 2, True),
)
MIDDLE = (  # up to 1024 rows: few tiles, so smaller ones fill the machine
    Config(128, 128, 1, 2, True),
    Config(128, 128, 2, 1, True),
    Config(128, 256, 1, 2, False),
    Config(128, 192, 2, 1, True),
    Config(128, 64, 1, 2, True),
    Config(128, 64, 1, 1, False),
)
SMALL = (  # up to 256 rows: the weight is read once, at the memory's speed
    Config(128, 64, 1, 1, False),
    Config(128, 128, 1, 1, False),
    Config(64, 64, 1, 1, False),
    Config(64, 128, 1, 1, False),
    Config(128, 256, 1, 2, False),
)
TINY = (  # up to 64 rows
    Config(64, 64, 1, 1, False),
    Config(64, 128, 1, 1, False),
    Config(64, 32, 1, 1, False),
    Config(64, 256, 1, 1, False),
)
ALL = tuple(dict.fromkeys((*LARGE, *DEEP, *PLAIN, *HEADS, *MIDDLE, *SMALL, *TINY)))
