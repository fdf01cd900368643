"""How quack 0.6.5 divides a tile among warps and shared memory, by the instruction that multiplies on a target.

Pure arithmetic that legality.py asks. Rules that are a machine's and no number: numbers are in its row (target.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coda_inductor.codegen.tiles import Config


@dataclass(frozen=True, slots=True)
class Streams:
    """What an epilogue moves through shared memory, a subtile at a time: bits of an element of each."""

    stores: Sequence[int]
    loads: Sequence[int]
    paired: bool  # each store has a value for two neighbouring accumulators, so that it is half as wide
    whole: bool  # the first store is the tile itself


class Mainloop(Protocol):
    """What differs between the GEMM classes of quack."""

    loads: int  # subtiles loaded ahead before the rest of shared memory is dealt out; 0: as many as are stored
    deepens: bool  # is the rest dealt to loads first, and is no stream deeper than the tile has subtiles?
    pads: bool  # is room for alignment kept always, or only where an epilogue has operands of its own?

    def exists(self, config: Config) -> bool:
        """Can the machine multiply such a tile?"""

    def shares(self, config: Config) -> bool:
        """Is such a tile for one product with a weight [N, K] only, as two warp groups share its columns?"""

    def warps(self, config: Config) -> tuple[int, int]:
        """How the warps of one tile's epilogue split it along M and N."""

    def subtile(self, config: Config, streams: Streams) -> tuple[int, int]:
        """The part of the tile that one turn of the epilogue handles."""


class Wgmma:
    """Accumulators in the registers of one warp group (pingpong) or of several (gemm_sm90.py)."""

    loads, deepens, pads = 4, True, False

    def exists(self, config: Config) -> bool:
        """Accumulators must fit the registers of one (pingpong) or all warp groups (GemmSm90.__init__)."""
        m, n = config.tile_m, config.tile_n
        if config.pingpong:
            widest = {64: 256, 128: 208, 192: 128}
            return m in widest and n % 16 == 0 and n <= widest[m]
        if m == 192:
            return n % 32 == 0 and n <= 256
        return m in (64, 128, 256) and n % 16 == 0 and n <= 256 and m * n <= 256 * 192

    def shares(self, config: Config) -> bool:
        """With a weight [K, N] the compiler of cutlass-dsl 4.8.1 aborts the process. Of two products side by side in a
        tile the results are wrong; of two that are added up they are right (H100, 192x192co2x1n)."""
        return self._groups(config)[1] > 1

    def warps(self, config: Config) -> tuple[int, int]:
        """Four warps of a group split its rows."""
        groups_m, groups_n = self._groups(config)
        return 4 * groups_m, groups_n

    def subtile(self, config: Config, streams: Streams) -> tuple[int, int]:
        """GemmSm90._compute_tile_shape_or_override."""
        groups_m, _ = self._groups(config)
        rows = next((rows for rows in (128, 192) if config.tile_m % rows == 0 and groups_m > 1), 64)
        return rows, math.gcd(32, config.tile_n)

    def _groups(self, config: Config) -> tuple[int, int]:
        """How the warp groups at work on one tile split it along M and N."""
        if config.pingpong:
            return 1, 1
        if config.tile_m == 192:
            return (3, 1) if config.tile_n <= 128 else (1, 2)
        return (2 if config.tile_m == 256 else config.tile_m // 64), 1


class Tcgen05:
    """Accumulators in tensor memory, two tiles of them; a warp for each kind of load (gemm_sm100.py). A tile of one
    block only: two blocks that multiply together split its rows, of which sums over M know nothing."""

    loads, deepens, pads = 0, False, True

    def exists(self, config: Config) -> bool:
        """128 rows, one for each thread of the epilogue, and an odd number of blocks along M: an even one multiplies
        in pairs (GemmSm100.__init__)."""
        in_step = config.tile_n % 32 == 0 and 32 <= config.tile_n <= 256
        return config.tile_m == 128 and in_step and not config.pingpong and config.cluster_m == 1

    def shares(self, config: Config) -> bool:
        """None."""
        return False

    def warps(self, config: Config) -> tuple[int, int]:
        """Each has a quarter of the rows."""
        return 4, 1

    def subtile(self, config: Config, streams: Streams) -> tuple[int, int]:
        """cutlass.utils.blackwell_helpers.compute_epilogue_tile_size, for 128 rows as they lie."""
        stored = streams.stores[0] if streams.whole and streams.stores else 16
        columns = 32
        if streams.loads:
            bits, wide = max(stored, streams.loads[0]), config.tile_n > 128
            columns = {32: (16, 32), 16: (32, 64)}.get(bits, (64, 64))[wide]
        return 128, math.gcd(columns, config.tile_n)


class Mma:
    """Accumulators in registers, multiplied warp by warp (gemm_sm120.py). No clusters."""

    loads, deepens, pads = 2, True, False

    def exists(self, config: Config) -> bool:
        """At most 128 accumulators a thread."""
        threads = 128 if config.pingpong else 256
        rows = 64 if config.pingpong else 128
        fits = config.tile_m % rows == 0 and config.tile_m * config.tile_n <= 128 * threads
        return fits and config.tile_n % 32 == 0 and (config.cluster_m, config.cluster_n) == (1, 1)

    def shares(self, config: Config) -> bool:
        """None."""
        return False

    def warps(self, config: Config) -> tuple[int, int]:
        """Four or, without pingpong, eight."""
        return (2, 2) if config.pingpong else (4, 2)

    def subtile(self, config: Config, streams: Streams) -> tuple[int, int]:
        """GemmSm120._compute_tile_shape_or_override. Where stores are paired each warp has 16 rows and 32 columns
        (TileStore.epi_tile_shape_override)."""
        m, n = self.warps(config)
        if streams.paired and streams.stores:
            return math.gcd(16 * m, config.tile_m), math.gcd(32 * n, config.tile_n)
        columns = 64 if streams.whole and streams.stores[:1] == [8] else 32
        return max(math.gcd(64, config.tile_m), 16 * m), max(math.gcd(columns, config.tile_n), 16 * n)


MAINLOOPS: dict[str, Mainloop] = {"wgmma": Wgmma(), "tcgen05": Tcgen05(), "mma": Mma()}
"""By the name that a target's row has."""
