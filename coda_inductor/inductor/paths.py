"""In which order and how far loops read: the paths by which one buffer is read, and the order of a loop's dimensions.

Loops run over what they write as it lies in memory, so two loops read the same in the same order if their paths are
equal, whatever the order of the dimensions of the values that they work on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from coda_inductor.core.errors import Unsupported

Path = tuple[str, ...]
"""How a buffer is read: the slices and permutations taken of it, outermost first; () is all of it, in its own order."""
Reads = dict[fx.Node, dict[Path, int]]
"""For every buffer that a value is made of, the parts read and their numbers of elements."""


def hint(size: Any, otherwise: int | None = 8192) -> int:
    """The extent that torch traced a symbolic size with. Where there was none: Inductor's own fallback, or, with None,
    Unsupported is raised."""
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    if known is None and otherwise is None:
        raise Unsupported(f"the size {size} is known only when the model runs")
    return int(otherwise if known is None else known)  # type: ignore[arg-type]


def name_of(node: fx.Node) -> str:
    """The name of an ATen operation without its overload, "" of anything else."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def reordered(node: fx.Node) -> tuple[int, ...] | None:
    """The permutation that a view applies to dimensions of more than one element; None if it keeps their order."""
    if name_of(node) not in ("permute", "transpose", "t"):
        return None
    source = node.all_input_nodes[0].meta["val"]
    dims, given = list(range(source.dim())), [int(d) for d in tree_leaves(node.args[1:]) if isinstance(d, int)]
    if name_of(node) == "permute":
        dims = [d % source.dim() for d in given]
    else:
        i, j = given or (0, 1)
        dims[i], dims[j] = dims[j], dims[i]
    return unsorted(dims, source)


def unsorted(dims: list[int], source: Tensor) -> tuple[int, ...] | None:
    """`dims` if they are another order of the dimensions of more than one element."""
    long = [d for d in dims if hint(source.shape[d]) > 1]
    return None if long == sorted(long) else tuple(dims)


def moved(reads: Reads, order: tuple[int, ...]) -> Reads:
    """What is read, in another order."""
    return {b: {permuted(p, order): n for p, n in r.items()} for b, r in reads.items()}


def permuted(path: Path, order: tuple[int, ...]) -> Path:
    """A path read in another order; an order and its inverse are none."""
    inverse = tuple(sorted(range(len(order)), key=lambda i: order[i]))
    return path[:-1] if path and path[-1] == f"permute{inverse}" else (*path, f"permute{order}")


def part_of(node: fx.Node) -> str:
    """Names a slice, so that the same slice taken twice is read once."""
    return f"{node.target}{[a for a in node.args[1:] if not isinstance(a, fx.Node)]}{sorted(node.kwargs)}"


def reduced_dims(node: fx.Node) -> set[int]:
    """The dimensions that a reduction runs over."""
    rank, given = node.all_input_nodes[0].meta["val"].dim(), node.args[1] if len(node.args) > 1 else None
    dims: Any = [given] if isinstance(given, int) else given
    return {int(d) % rank for d in dims} if isinstance(dims, list | tuple) and dims else set(range(rank))


def reduced_last(node: fx.Node) -> tuple[int, ...] | None:
    """The order in which a reduction reads its dimensions, None if it is theirs."""
    source, reduced = node.all_input_nodes[0].meta["val"], reduced_dims(node)
    return unsorted(sorted(in_memory(source), key=lambda d: d in reduced), source)


def in_memory(value: Tensor) -> list[int]:
    """The dimensions as the tensor lies in memory, major to minor."""
    return sorted(range(value.dim()), key=lambda d: -hint(value.stride(d)))


def memory_order(value: Tensor) -> tuple[int, ...] | None:
    """The order in which a loop that writes the tensor runs, None if it is its dimensions'."""
    return unsorted(in_memory(value), value)


def is_inner(node: fx.Node) -> bool:
    """Does the reduction run over the last dimensions, as the tensor lies in memory?"""
    source, reduced = node.all_input_nodes[0].meta["val"], reduced_dims(node)
    kept = [hint(source.stride(d)) for d in range(source.dim()) if d not in reduced and hint(source.shape[d]) > 1]
    inside = [hint(source.stride(d)) for d in reduced if hint(source.shape[d]) > 1]
    return not kept or not inside or max(inside) < min(kept)
