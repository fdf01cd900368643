"""How a Sweep's kernel divides its work. Facts and arithmetic only: read by the kernel, which imports the compiler, and
by its launch, which does not."""

from __future__ import annotations

from coda_inductor.codegen.legality import VECTOR
from coda_inductor.core.sweep import Part, Sweep

THREADS, WARPS, ROWS = 32, 4, 2  # of a warp; of a block; that a warp reads at once
STRIP = THREADS * VECTOR  # columns of a warp
RESIDENT = 8  # blocks for each multiprocessor


def strips(part: Part) -> int:
    """How many warps lie side by side over a part."""
    return -(-part.n // STRIP)


def slots(sweep: Sweep, output: int) -> dict[int, int]:
    """For each part, by number, that adds to a sum over N: which of the partial results is its first strip's."""
    found, first = dict[int, int](), 0
    for number, part in enumerate(sweep.parts):
        if any(write.output == output for write in part.writes):
            found[number] = first
            first += strips(part)
    return found


def tiles(sweep: Sweep, output: int, blocks: int) -> int:
    """How many partial results each entry of a sum has."""
    if sweep.outputs[output].extent == "feature":
        return blocks
    return sum(strips(sweep.parts[number]) for number in slots(sweep, output))


def blocks(sweep: Sweep, m: int, multiprocessors: int) -> int:
    """How many blocks share a strip: they stay until all rows are done."""
    count = sum(map(strips, sweep.parts))
    return max(1, min(RESIDENT * multiprocessors // count, -(-m // (WARPS * ROWS))))


def partial_results(sweep: Sweep) -> tuple[int, int]:
    """How many there are in all for each row, and for each of the blocks that share a strip."""
    of = [(o.extent, tiles(sweep, i, 1) if o.extent == "token" else o.width) for i, o in enumerate(sweep.outputs)]
    return sum(n for extent, n in of if extent == "token"), sum(n for extent, n in of if extent == "feature")
