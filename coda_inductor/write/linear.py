"""What is proportional to a number: the degree of each operation in it.

A value of degree 1 is the number times what it is where the number is 1. One of degree 0 does not depend on it. All
gradients of a scalar loss are of degree 1 in the loss's own gradient. So they can be computed in the forward, with 1 in
its place, and multiplied by it in the backward.

Zeros are of every degree (ANY). An operation that no row names is of degree 0 if all its inputs are, else refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import reduce

from torch import fx

from coda_inductor.core import reductions
from coda_inductor.core.dtypes import EIGHT_BITS, FORMATS
from coda_inductor.core.region import Region, parse
from coda_inductor.ops.custom import ADDED_UP, REGION
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.slices import SPLITS

ANY = None
Degree = int | None


class NotLinear(Exception):
    """Something that is neither independent of the number nor proportional to it."""


def same(degrees: Iterable[Degree]) -> Degree:
    """Of a sum, or a choice, of values. Raises NotLinear unless they are all of one."""
    found = {d for d in degrees if d is not ANY}
    if len(found) > 1:
        raise NotLinear("a sum of what is proportional and what is not")
    return found.pop() if found else ANY


def product(degrees: Iterable[Degree]) -> Degree:
    """Of a product. Raises NotLinear for squares."""

    def times(a: Degree, b: Degree) -> Degree:
        return ANY if a is ANY or b is ANY else a + b

    one: Degree = 0
    if (total := reduce(times, degrees, one)) is not ANY and total > 1:
        raise NotLinear("a square")
    return total


def none(degrees: Iterable[Degree]) -> Degree:
    """Of any function. Raises NotLinear for one of what is proportional."""
    if any(degrees):
        raise NotLinear("a function that is not linear")
    return 0


def ratio(degrees: Iterable[Degree]) -> Degree:
    """Of a quotient."""
    first, *rest = degrees
    none(rest)
    return first


def choice(degrees: Iterable[Degree]) -> Degree:
    """Of what the first decides between."""
    first, *rest = degrees
    none([first])
    return same(rest)


def sum_with_product(degrees: Iterable[Degree]) -> Degree:
    """Of a product of the last two, added to the first if there is one more."""
    *into, left, right = degrees
    return same([*into, product([left, right])])


CONSTANTS = frozenset({aten.full.default, aten.scalar_tensor.default})
SCATTERED = frozenset({aten.scatter.value, aten.scatter.src, aten.scatter_add.default})
Rule = Callable[[list[Degree]], Degree]

ATEN: dict[object, Rule] = {
    aten.add.Tensor: same,
    aten.sub.Tensor: same,
    aten.mul.Tensor: product,
    aten.mul.Scalar: product,
    aten.div.Tensor: ratio,
    aten.div.Scalar: ratio,
    aten.neg.default: same,
    aten.where.self: choice,
    aten.gather.default: ratio,
    aten.mm.default: product,
    ADDED_UP: sum_with_product,
    aten.sum.default: same,
    aten.mean.default: same,
}
"""Operations by what they read, tensors and numbers among their arguments alike. Views and casts are `same`."""
LETS: dict[str, Rule] = {
    "add": same,
    "sub": same,
    "neg": same,
    "mul": product,
    "scaled": product,
    "first": same,
    "second": same,
    **{name: same for name, row in FORMATS.items() if row.narrow},
    **dict.fromkeys(("if_positive", "if_nonpositive", "if_negative", "if_nonnegative"), choice),
}
"""Operations of an epilogue, likewise."""


def degree(node: fx.Node, of: Mapping[fx.Node, Degree | tuple[Degree, ...]]) -> Degree | tuple[Degree, ...]:
    """The node's degree; of a Region, those of its results. Nodes that `of` does not name are of degree 0. Raises
    NotLinear."""

    def known(x: object) -> Degree:
        if isinstance(x, fx.Node) and x not in of and x.target in CONSTANTS:
            return known(x.args[-1])
        if isinstance(x, fx.Node):
            return of.get(x, 0)  # type: ignore[return-value]
        return ANY if x == 0 and not isinstance(x, bool) else 0

    if node.target is REGION:
        return of_region(parse(node.args[1]), [known(x) for x in node.args[0]])  # type: ignore
    if node.target is operator.getitem and (made := of.get(node.args[0], 0)) and isinstance(made, tuple):  # type: ignore
        return made[node.args[1]]  # type: ignore[index]
    if node.target in CONSTANTS:
        return known(node.args[-1])
    if g.is_cast(node) and not _rounds(node):
        return none([known(node.args[0])])
    if g.is_view(node) or g.is_cast(node) or node.target in (*SPLITS, operator.getitem, aten.slice.Tensor):
        return known(node.args[0])
    if (found := g.reduction(node)) is not None and (found.name == "mean" or _adds_up(found.name)):
        return known(found.source)
    if node.target in SCATTERED:
        none([known(node.args[2])])
        return same([known(node.args[0]), known(node.args[3])])
    rule = ATEN.get(node.target)
    if rule is None:
        return none([known(x) for x in node.all_input_nodes])
    return rule([known(x) for x in node.args if isinstance(x, fx.Node | int | float)])


def _rounds(cast: fx.Node) -> bool:
    """Does the cast keep numbers but for their last bits? Whole numbers do not, and 8 bits have too few exponents."""
    dtypes = [n.meta["val"].dtype for n in (cast, cast.args[0])]  # type: ignore[union-attr]
    return all(dtype.is_floating_point and dtype not in EIGHT_BITS for dtype in dtypes)


def _adds_up(name: str) -> bool:
    return name in reductions.REDUCTIONS and reductions.REDUCTIONS[name].linear


def of_region(region: Region, inputs: list[Degree]) -> tuple[Degree, ...]:
    """The degrees of a Region's results, of those of its inputs. Raises NotLinear."""
    found: dict[str | float, Degree] = {
        p.name: same(product([inputs[a], inputs[b]]) for a, b in p.pairs) for p in region.products
    }
    found |= {o.name: d for o, d in zip(region.operands, inputs[region.matrices :], strict=True)}

    def known(x: str | float) -> Degree:
        return (ANY if x == 0 else 0) if isinstance(x, float | int) else found[x]

    for let in region.lets:
        found[let.name] = LETS.get(let.op, none)([known(x) for x in let.args])
    stores = [same(known(x) for x in (s.value, s.second) if x) for s in region.stores]
    sums = [(same if _adds_up(r.of) else none)([known(r.value)]) for r in region.reductions]
    return (*stores, *sums)
