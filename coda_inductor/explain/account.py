"""Whose bytes are whose: which tensors of which kernels a rewriting took over, and which kernels touch whole tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from coda_inductor.patterns.graph import MATRIX_PRODUCTS
from coda_inductor.patterns.sizes import assumed
from coda_inductor.schedule.kinds import base_of, elements, itemsize, owner
from coda_inductor.schedule.model import Kernel


@dataclass(frozen=True, slots=True)
class Touch:
    """The bytes that one kernel moves of one tensor, and the names of its operations that touch this tensor."""

    bytes: int
    operations: frozenset[str]


def touched(kernel: Kernel) -> list[Touch]:
    """A kernel's bytes, tensor by tensor, with the operations of the kernel that read or write each."""
    users: dict[fx.Node, set[str]] = {buffer: set() for buffer in kernel.reads}
    for node in kernel.nodes:
        for value in node.all_input_nodes:
            if (base := base_of(value)) in users:
                users[base].add(node.name)
    made = [Touch(moved, frozenset({owner(buffer).name})) for buffer, moved in kernel.writes.items()]
    return [Touch(kernel.reads[b], frozenset(names)) for b, names in users.items()] + made


class Absorbs(Protocol):
    """A record of a rewriting: its own name, and the operations that nobody runs any more, or that a Region does."""

    @property
    def name(self) -> str: ...

    @property
    def absorbed(self) -> tuple[str, ...]: ...


def attribute(touches: Iterable[Touch], sites: Sequence[Absorbs]) -> dict[str, int]:
    """Bytes that no operation outside a Region moves any more, by the record that absorbed most of what moved them."""
    homes: dict[str, list[str]] = {}
    for site in sites:
        for name in site.absorbed:
            homes.setdefault(name, []).append(site.name)
    share: Counter[str] = Counter()
    for touch in touches:
        if touch.operations and all(name in homes for name in touch.operations):
            most = Counter(home for name in sorted(touch.operations) for home in homes[name])
            share[most.most_common(1)[0][0]] += touch.bytes
    return dict(share)


def smallest_tile(graph: fx.Graph) -> int:
    """Elements of the smallest output [M, N] of a product over the tokens, as many as most products have rows."""
    names = {op._schema.name for op in MATRIX_PRODUCTS}  # type: ignore[attr-defined]
    products = [n for n in graph.nodes if getattr(n.target, "_schema", None) and n.target._schema.name in names]
    rows = [elements(p) // max(_last(p), 1) for p in products]
    if not rows:
        return 1 << 20
    tokens = Counter(rows).most_common(1)[0][0]
    return min(elements(p) for p, m in zip(products, rows, strict=True) if m == tokens)


def _last(node: fx.Node) -> int:
    return assumed(node.meta["val"].shape[-1])


def touches_tile(kernel: Kernel, smallest: int) -> bool:
    """Does the kernel read or write a whole M x N tensor?"""
    moved = [(n, b) for d in (kernel.reads, kernel.writes) for n, b in d.items()]
    return any(b // itemsize(n) >= smallest for n, b in moved)
