"""Which Regions can become a kernel, and in which tile configurations. Pure arithmetic: no compiler, no GPU.

One predicate, `require`, says whether a Region runs in a Config and names the first condition that fails; `check` and
`candidates` are loops over it. The facts of a machine come from its row in target.py. The shared-memory model follows
the stage rules of quack 0.6.5 (`_compute_stages` of its GEMM classes); a test compares the two.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from coda_inductor.codegen.mainloops import MAINLOOPS, Mainloop, Streams
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.dtypes import FORMATS
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.heads import columns, over_heads, summand
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Operand, Region

BYTES = {name: row.torch.itemsize for name, row in FORMATS.items() if row.cute}
LOADED = ("tile", "table")  # operands that pass through shared memory, a subtile at a time
TILE_K = 64  # four instructions of 16-bit operands
K_BYTES = 128  # of a row of K in one step, whatever the operands


BUCKETS = tuple(1 << n for n in range(6, 16))
"""The powers of two from 64 to 32768."""


def bucket(m: int) -> int:
    """The token counts that share a tile choice: the next power of two, BUCKETS' first at least and last at most."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def size_class(region: Region, m: int, target: Target = SM_90A) -> int:
    """The name of the token counts that share a tile choice with `m`: its bucket, or where even tiles are worth timing
    `m` itself, as at most others of the bucket they are slow."""
    offered = target.even and bucket(m) > 1024 and not set(target.even).isdisjoint(candidates(region, m, target))
    return m if offered else bucket(m)


def candidates(region: Region, m: int, target: Target = SM_90A) -> tuple[Config, ...]:
    """The legal configurations worth timing at `m` tokens, the likely best first; empty if none is legal."""
    size = bucket(m)
    few = target.tiny if size <= 64 else target.small if size <= 256 else target.middle
    eight_bits = BYTES.get(region.dtype) == 1
    many, one_table = _large(region, target), region.adds or (eight_bits and not region.fast)
    for table in (few if size <= 1024 and not one_table else many, _any(region, target)):
        if legal := tuple(c for c in table if is_legal(region, c, target)):
            return legal if size <= 1024 or eight_bits else legal + _even(region, m, target, legal)
    return ()


WORTH_TIMING = 0.93
"""An even tile is timed if by `_work` it takes at most this part of what the best of the table takes. Of eight shapes,
the one at 0.86 won by 9 %, and two at 0.94 lost by 15 and 21 % (H100, bench/results/tiles.jsonl)."""
EDGE = 32
"""What a row or column of a tile costs to load, in accumulators: so weighed, the tiles of 4608 x 3072 x 15360 come in
the order of their times but for one (the same rows)."""


def _even(region: Region, m: int, target: Target, table: tuple[Config, ...]) -> tuple[Config, ...]:
    """What else is worth timing at `m` rows, as the tiles of the table divide the machine badly."""
    if not target.even or region.is_plain:  # plain products have a table of their own
        return ()
    least = WORTH_TIMING * min(_work(region, m, config, target) for config in table)
    better = (c for c in target.even if c not in table and _work(region, m, c, target) <= least)
    return tuple(c for c in better if is_legal(region, c, target))


def _work(region: Region, m: int, config: Config, target: Target) -> int:
    """The accumulators that the busiest multiprocessor makes, and more for what it loads, EDGE for each row and column
    of a tile. 4608 x 3072 are 432 tiles of 128 x 256, of which 132 multiprocessors make four each at most, and most
    make three."""
    columns = region.n * len(region.products)
    count = -(-m // config.tile_m) * -(-columns // config.tile_n)
    tile = config.tile_m * config.tile_n + EDGE * (config.tile_m + config.tile_n)
    return -(-count // target.multiprocessors) * tile


def _any(region: Region, target: Target) -> tuple[Config, ...]:
    """The table in one of whose tiles a Region must run."""
    if region.adds:
        return target.adds
    if BYTES.get(region.dtype) != 1:
        return target.large
    if region.fast:
        return target.fast
    return target.slow_heavy if _tile_operands(region) > 1 else target.slow


def _tile_operands(region: Region) -> int:
    return sum(o.extent == "tile" for o in region.operands)


def _large(region: Region, target: Target) -> tuple[Config, ...]:
    """The table for many rows."""
    if region.adds or BYTES.get(region.dtype) == 1:
        return _any(region, target)
    if _tile_operands(region) > 1:
        return target.heavy
    if region.halved:
        return target.heads
    if min(region.n, region.depth) < target.deep_least:
        return target.large
    if region.is_plain:
        return target.plain
    return target.deep if is_legal(region, target.deep[1], target) else target.large


def check(region: Region, target: Target = SM_90A) -> None:
    """Raises Unsupported, with the reason of the last hope, if no large tile can run this Region. What fits only into
    small tiles would lose to separate operations wherever they take time."""
    require_shape(region, target)
    table = _any(region, target)
    if not any(is_legal(region, c, target) for c in table):
        require(region, max(table, key=lambda c: stages(region, c, target).ab), target)


def is_legal(region: Region, config: Config, target: Target = SM_90A) -> bool:
    """`require` as a question."""
    try:
        require(region, config, target)
    except Unsupported:
        return False
    return True


def require(region: Region, config: Config, target: Target = SM_90A) -> None:
    """Raises Unsupported naming the first condition that keeps `region` from running in `config`."""
    require_shape(region, target)
    _need(MAINLOOPS[target.mainloop].exists(config), f"no mainloop for tiles of {config}")
    _need(region.is_plain or not config.turned, f"{config} is for a product with nothing beside it")
    lanes, head = len(region.products), 2 * region.half
    _need(config.tile_n % (16 * lanes) == 0, f"{config}: tile_n is not a multiple of {16 * lanes}")
    # What one block of a cluster loads must be a box of whole or parts of heads: 96 columns of heads of 64 are not, and
    # the kernel waits for ever (H200, 128x192 in two). Neighbours lie as columns do: their tile must fit a table.
    loaded = config.tile_n // config.cluster_m if region.halved else config.tile_n
    for width in (config.tile_n, loaded) if head else ():
        _need(width % head == 0 or head % width == 0, f"{config}: {width} columns and heads of {head} do not fit")
    if any(o.extent == "table" for o in region.operands):
        turn = MAINLOOPS[target.mainloop].subtile(config, _streams(region))[1]
        _need(head % turn == 0, f"{config}: {turn} columns at a time and a table of {head} do not fit")
    for width in {columns(region, let) for let in over_heads(region)}:
        turn = MAINLOOPS[target.mainloop].subtile(config, _streams(region))[1]
        # Of a narrower head a thread would add up its columns of others, too: they lie between.
        nested = config.tile_n % width == 0 and width % turn == 0
        _need(nested, f"{config}: sums over heads of {width}, {turn} columns at a time, do not fit")
    for o in region.operands:
        fits = o.extent != "sample" or o.tokens % config.tile_m == 0  # all rows of a tile read one vector
        _need(fits, f"{config}: {config.tile_m} rows and samples of {o.tokens} tokens do not fit", WHOLE_TILES)
    for r in region.reductions:
        fits = r.tokens % config.tile_m == 0  # of each sample's sum whole tiles are parts
        _need(fits, f"{config}: {config.tile_m} rows and samples of {r.tokens} tokens do not fit", WHOLE_TILES)
    simple = lanes == 1 and region.products[0].b_layout == "nk"
    _need(
        simple or not MAINLOOPS[target.mainloop].shares(config),
        f"{config} is for a tile of one product, with a weight [N, K]",
    )
    found = stages(region, config, target).ab
    room = f"shared memory for {max(found, 0)} of the {target.least_stages} steps that it loads ahead"
    _need(found >= target.least_stages, f"{_beside(region)}, which leave the product {room}", LESS)


WHOLE_TILES = "tokens of a sample in multiples of 128: pad them"
LESS = "keep fewer tensors [M, N] alive there, or in 16 bits: return less, or checkpoint the layer"


def _beside(region: Region) -> str:
    """What of [M, N] an epilogue reads and writes, in words."""
    loads = [o.dtype for o in region.operands if o.extent in LOADED]
    sides = (("reads", loads), ("writes", [s.dtype for s in region.stores]))

    def listed(dtypes: list[str]) -> str:
        counts = Counter(FORMATS[d].words for d in dtypes)
        return " and ".join(f"{n} matri{'x' if n == 1 else 'ces'} of {kind}" for kind, n in counts.items())

    return "beside the product it " + (" and ".join(f"{verb} {listed(ds)}" for verb, ds in sides if ds) or "sums")


def require_shape(region: Region, target: Target) -> None:
    """The conditions that no configuration can mend, cheapest first."""
    multiplied = " or ".join(", ".join(target.multiplies).rsplit(", ", 1))
    for dtype in region.dtypes:
        _need(dtype in target.multiplies, f"matrices of {dtype}", f"kernels multiply {multiplied}")
    eight_bits = [BYTES[dtype] == 1 for dtype in region.dtypes]
    _need(all(eight_bits) or region.dtype == region.dtypes[1], "matrices of two dtypes")
    if eight_bits[0]:
        alike = len(set(region.dtypes)) == 1
        _need(
            alike or target.mixes, f"matrices of {' and '.join(region.dtypes)}", f"on {target.name} of one dtype only"
        )
        in_rows = all((p.a_layout, p.b_layout) == ("mk", "nk") for p in region.products)
        _need(in_rows, "8-bit matrices that do not lie in rows of K")
        _need(not region.summed, "two products of 8-bit matrices in one sum")
    _need(bool(target.adds) or not region.adds, f"a product that is added to memory, on {target.name}")
    _require_rows(region)
    for o in region.operands:
        _need(o.dtype in BYTES, f"operand {o.name} of {o.dtype}")
    for s in region.stores:
        _need(s.dtype in BYTES, f"store of {s.dtype}")
    count = len(region.operands)
    _need(count <= target.max_operands, f"{count} operands, {target.max_operands} at most")
    _need(len(region.products) <= 2, f"{len(region.products)} products share the tile, two at most")
    if len(region.products) == 2:
        _require_lanes(region, target)
    for let in over_heads(region):
        _need(len(region.products) == 1 or bool(region.half), "a sum over heads beside two products")
        summand(region, let)
    if region.summed:
        k = region.products[0].k
        _need(k % TILE_K == 0, f"two products with k = {k} in one sum, which is not a multiple of {TILE_K}")
        _need(not region.unlike or target.unlike, f"two products of unlike k in one sum, on {target.name}")


PAD = "pad the weight: rows must be 16-byte aligned"


def _require_rows(region: Region) -> None:
    """Rows of 16-bit matrices are copied or written so that they begin at multiples of 16 bytes (core/blocks.py). 8-bit
    matrices lie as the user left them."""
    unit = 16 // BYTES[region.dtype]
    if unit == 8:
        # Vectors of 16 bits are copied two numbers at a time: the last would come from behind an odd end.
        halves = [o.name for o in region.operands if o.extent in ("feature", "sample") and o.dtype != "f32"]
        _need(region.n % 2 == 0 or not halves, f"n = {region.n} is odd beside a vector of 16 bits", PAD)
        # Beside two products vectors are widened, and those of samples then lie in dense rows of float32.
        sampled = len(region.products) == 2 and any(o.extent == "sample" for o in region.operands)
        _need(region.n % 4 == 0 or not sampled, f"n = {region.n} beside vectors of samples, of two products", PAD)
        return
    across = {(p.b_layout, k if p.b_layout == "nk" else region.n) for p in region.products for _, _, k in p.terms}
    for layout, size in sorted(across):
        _need(size % unit == 0, f"{'k' if layout == 'nk' else 'n'} = {size} is not a multiple of {unit}", PAD)
    _need(region.n % 8 == 0, f"n = {region.n} is not a multiple of 8", PAD)


def _require_lanes(region: Region, target: Target) -> None:
    """Two products become adjacent columns of one: same A, same K, both weights [N, K]."""
    p, q = region.products
    _need(p.a == q.a, "two products of different left operands in one tile")
    if region.half:
        widths = " or ".join(", ".join(str(2 * half) for half in target.halves).rsplit(", ", 1))
        _need(region.half in target.halves, f"heads of {2 * region.half}, not of {widths}")
        several = region.neighbours and len(region.stores) > 1
        _need(not several, f"{len(region.stores)} stores of neighbouring features, of which a kernel has one")
    else:
        _need(p.b != q.b, "two products of the same weight")
    _need(p.k == q.k, f"two products with k = {p.k} and {q.k}")
    _need(p.b_layout == q.b_layout == "nk", "two products of [K, N] weights", "lanes need a weight stored [N, K]")
    _need(all(s.dtype != "f32" for s in region.stores), "an f32 store beside two products", "store 16 bits")
    for r in region.reductions:
        row = REDUCTIONS[r.of]
        _need(row.repeats or r.over == "N", f"a {r.of} over M beside two products", "one product per tile")
        _need(row.linear or row.repeats, f"a {r.of} beside two products", "one product per tile")
    tiles = [o.name for o in region.operands if o.extent == "tile"]
    _need(not tiles, f"tile operand {', '.join(tiles)} beside two products")


def _need(holds: bool, what: str, hint: str = "") -> None:
    if not holds:
        raise Unsupported(what, hint=hint)


@dataclass(frozen=True, slots=True)
class Stages:
    """Pipeline depths: `ab` mainloop tiles, `store` and `load` epilogue subtiles; `bytes` of all but the first."""

    ab: int
    store: int
    load: int


def stages(region: Region, config: Config, target: Target = SM_90A) -> Stages:
    """What quack will choose for this Region in this Config."""
    loop, streams = MAINLOOPS[target.mainloop], _streams(region)
    epi_m, epi_n = loop.subtile(config, streams)
    subtiles = config.tile_m * config.tile_n // (epi_m * epi_n)
    most = subtiles if loop.deepens else math.inf
    # Two halves leave as two stores of half a tile each, neighbours as one of a tile.
    store_bytes = sum(epi_m * epi_n // (1 if region.half else len(region.products)) * b // 8 for b in streams.stores)
    load_bytes = sum(epi_m * epi_n * b // 8 for b in streams.loads)
    first = 4 if epi_n <= 16 else 2
    store = int(min(most, first))
    load = int(min(most, loop.loads or first)) if load_bytes else 0
    fixed = _vector_bytes(region, config, loop)
    slots = (2 if region.halved else 1) * len(region.stores) + len(streams.loads)
    # One store and one tile load live outside the block of epilogue operands, whose end is padded to 1 KiB.
    inside = loop.pads or fixed or (slots - (streams.whole and bool(region.stores)) - bool(load_bytes)) > 0
    left = target.shared_memory - 1024 - (1024 if inside else 0) - fixed - store_bytes * store - load_bytes * load
    per_stage = (config.tile_m + config.tile_n) * K_BYTES
    ab = left // per_stage
    left -= ab * per_stage
    if load_bytes and loop.deepens:
        more = max(0, min(left // load_bytes, min(5, subtiles) - load))
        load, left = load + more, left - more * load_bytes
    return Stages(ab, store + (left // store_bytes if store_bytes else 0), load)


def _streams(region: Region) -> Streams:
    """What passes through shared memory. Of two products, each store is half of the doubled tile, but of neighbours."""
    loads = [8 * BYTES[o.dtype] for o in region.operands if o.extent in LOADED]
    whole = len(region.products) == 1 or region.neighbours
    return Streams([8 * BYTES[s.dtype] for s in region.stores], loads, paired=not whole, whole=whole)


def _vector_bytes(region: Region, config: Config, loop: Mainloop) -> int:
    """Shared memory of token and feature vectors, and of sums that warps pass on: every warp but the first of those
    that share a row or column of the tile."""
    length = {"token": config.tile_m, "feature": config.tile_n, "sample": config.tile_n, "tile": 0, "table": 0}
    warps_m, warps_n = loop.warps(config)
    passed_on = {"N": config.tile_m * (warps_n - 1), "M": config.tile_n * (warps_m - 1)}
    sums = 4 * sum(passed_on[r.over] * REDUCTIONS[r.of].planes for r in region.reductions)
    sums += sum(4 * config.tile_m * (config.tile_n // columns(region, let)) * warps_n for let in over_heads(region))
    return sums + sum(length[o.extent] * _vector_itemsize(region, o) for o in region.operands)


def _vector_itemsize(region: Region, operand: Operand) -> int:
    """Vectors over features beside two products are read as f32 (one value serves both lanes)."""
    widened = operand.extent in ("feature", "sample") and len(region.products) == 2
    return 4 if widened else BYTES[operand.dtype]
