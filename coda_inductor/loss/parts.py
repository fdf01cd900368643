"""Terms of a gradient of scores, a p f' with p the softmax, the one-hot or 1, and which computations are equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten

SOFTMAX, ONE_HOT, ONES, OF_ROWS = "softmax", "one-hot", "ones", "of rows"
SAME = g.VIEWS | g.COPIES | {aten.alias.default, aten.detach.default}
DEEPEST = 100
"""Computations of more steps are equal only if they are one."""


class NotRead(Exception):
    """What a head's scores go through that has no meaning here."""


@dataclass(frozen=True, slots=True)
class Part:
    """number * rows * slopes * (softmax, one-hot or 1), or of a sum of such over the columns, number * rows: `rows`
    have one value a row, `slopes` are made of the product."""

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


@dataclass(frozen=True, slots=True)
class Gradient:
    """(pairs (softmax - one-hot) + rest softmax) f' + ones: each a sum of terms, of which only the factors count."""

    pairs: Parts
    rest: Parts
    ones: Parts

    @property
    def softmax(self) -> Parts:
        """The terms of the softmax."""
        return self.pairs + self.rest

    @property
    def slopes(self) -> tuple[fx.Node, ...]:
        """What all terms but ones are multiplied by, made of the product."""
        return self.pairs[0].slopes


def sorted_out(parts: Parts, keys: Keys) -> Gradient:
    """The gradient that is the sum of these terms. Raises NotRead unless each one-hot has a softmax of its factors."""
    found = matched(parts, keys) or matched(tuple(each for p in parts for each in multiplied_out(p)), keys)
    if found is None:
        raise NotRead("its gradient multiplies the softmax and the one-hot by different values")
    if len({factors(replace(p, rows=(), number=1.0), keys) for p in found.softmax}) > 1:
        raise NotRead("its gradient multiplies terms by different values of the scores")
    return found


def matched(parts: Parts, keys: Keys) -> Gradient | None:
    """The terms, if each one-hot, of which there is one, has a softmax of its factors."""
    rest, pairs = [p for p in parts if p.of == SOFTMAX], list[Part]()
    for hot in (p for p in parts if p.of == ONE_HOT):
        equal = next((p for p in rest if factors(p, keys) == factors(scaled((hot,), -1.0)[0], keys)), None)
        if equal is None:
            return None
        rest.remove(equal)
        pairs.append(equal)
    return Gradient(tuple(pairs), tuple(rest), tuple(p for p in parts if p.of == ONES)) if pairs else None


def factors(part: Part, keys: Keys) -> tuple[object, ...]:
    """What a term is multiplied by; equal for equal values, in any order."""
    return (part.number, *(tuple(sorted(map(keys.of, of))) for of in (part.rows, part.slopes)))


def multiplied_out(part: Part) -> Parts:
    """The terms of a product of sums of values of the rows."""
    for i, row in enumerate(part.rows):
        if row.target is aten.add.Tensor and not row.kwargs and len(row.all_input_nodes) == 2:
            rest = replace(part, rows=(*part.rows[:i], *part.rows[i + 1 :]))
            return tuple(each for x in row.all_input_nodes for each in multiplied_out(rest.times(x)))
    return (part,)


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
