"""Terms of a gradient of scores, a p f' with p the softmax or the one-hot, and which computations are equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten

SOFTMAX, ONE_HOT, OF_ROWS = "softmax", "one-hot", "of rows"
SAME = g.VIEWS | g.COPIES | {aten.alias.default, aten.detach.default}
DEEPEST = 100
"""Computations of more steps are equal only if they are one."""


class NotRead(Exception):
    """What a head's scores go through that has no meaning here."""


@dataclass(frozen=True, slots=True)
class Part:
    """number * rows * slopes * (softmax or one-hot), or of a sum of such over the columns, number * rows: `rows` have
    one value a row, `slopes` are made of the product."""

    of: str
    number: float = 1.0
    rows: tuple[fx.Node, ...] = ()
    slopes: tuple[fx.Node, ...] = ()

    def times(self, row: fx.Node) -> Part:
        """Multiplied by a value of each row: by -r, that is by -1 and r."""
        number = self.number
        while (source := viewed(row)) is not None or row.target is aten.neg.default:
            number = number if source is not None else -number
            row = row.all_input_nodes[0] if source is None else source
        return replace(self, number=number, rows=(*self.rows, row))


Parts = tuple[Part, ...]


def scaled(parts: Parts, number: float) -> Parts:
    """The terms, times a number."""
    return tuple(replace(p, number=p.number * number) for p in parts)


def check(parts: Parts, keys: Keys) -> None:
    """Raises NotRead unless the gradient is a f' (softmax - one-hot)."""
    kinds = {p.of: p for p in parts}
    if len(parts) != 2 or kinds.keys() != {SOFTMAX, ONE_HOT}:
        raise NotRead("its gradient is more than a softmax less a one-hot")
    soft, hot = kinds[SOFTMAX], kinds[ONE_HOT]
    factors = ([sorted(map(keys.of, values)) for values in (p.rows, p.slopes)] for p in (soft, hot))
    if soft.number != -hot.number or next(factors) != next(factors):
        raise NotRead("its gradient multiplies the softmax and the one-hot by different values")


class Keys:
    """A number for each computation, equal for equal ones, whatever views stand between."""

    def __init__(self) -> None:
        self.nodes = dict[fx.Node, int]()
        self.known = dict[object, int]()

    def of(self, node: fx.Node, depth: int = 0) -> int:
        """The node's number."""
        while (source := viewed(node)) is not None:
            node = source
        if node not in self.nodes:
            self.nodes[node] = self.known.setdefault(self._computation(node, depth), len(self.known))
        return self.nodes[node]

    def _computation(self, node: fx.Node, depth: int) -> object:
        if depth > DEEPEST:
            return node
        if node.op != "call_function" or not (g.is_pointwise(node) or node.target is aten.scalar_tensor.default):
            return node
        size = g.tensor(node).numel()  # type: ignore[union-attr]

        def argument(x: object) -> object:
            if not isinstance(x, fx.Node):
                return repr(x)
            value = g.tensor(x)
            # What is repeated is known by its own dimensions, not by its numbers in their order.
            alike = value is not None and value.numel() in (1, size)
            return self.of(x, depth + 1) if alike else x

        options = tuple((name, repr(x)) for name, x in sorted(node.kwargs.items()))
        return (node.target, *map(argument, node.args), options, g.tensor(node).dtype)  # type: ignore[union-attr]


def unchanged(node: fx.Node) -> fx.Node | None:
    """The tensor that the node only rearranges by rows, copies, or casts to another floating-point dtype."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or g.tensor(source) is None or node.target is aten.permute.default:
        return None
    if node.target in SAME:
        return source
    return source if g.is_cast(node) and all(g.floating(n) for n in (node, source)) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor whose numbers are the node's, in their order: of a view, or of what is written over all of another."""
    whole = node.target in (aten.select_scatter.default, aten.slice_scatter.default)
    if not whole and (node.target not in g.VIEWS or node.target in (aten.permute.default, aten.expand.default)):
        return None
    source = node.args[int(whole)]
    same = g.tensor(source) is not None and g.tensor(source).numel() == g.tensor(node).numel()  # type: ignore[union-attr]
    return source if same and isinstance(source, fx.Node) else None
