"""Programs by rows: which operations give, of some rows of what they read, the same rows of their result.

The rows are those of one matrix product, whose first dimension may stand as several, as sequences and their tokens. A
node is `Rows(lead)` if its first `lead` dimensions are the rows. `demands` says what a node has to read so that it can
be computed for some of the rows, and `form_of` what a reader of rows is. Some rows are written as one dimension
(blocks.py): softmax([B, T, V]) of m of the B * T rows is softmax([m, V]).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from torch import fx

from coda_inductor.core.region import parse
from coda_inductor.ops.custom import ADDED_UP, REGION
from coda_inductor.ops.loss import LOSS_ROWS, LOSS_TARGETS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten


@dataclass(frozen=True, slots=True)
class Rows:
    """The first `lead` dimensions of a tensor are the rows."""

    lead: int = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated over some of the dimensions of the rows, as [T, V] beside [B, T, V]: an input, which is expanded. The
    rows have the sizes `first`; it has the last `own` of these itself, some of them as 1."""

    first: tuple[int, ...]
    own: int


class Other(Enum):
    """What else a node is to a program by rows."""

    WHOLE = "read as it is, by all rows"
    TURNED = "[features, rows]"
    SUMMED = "added up over all rows"
    LIST = "the results of a Region, or of the rows of a loss"


Form = Rows | Spread | Other
WHOLE, TURNED, SUMMED, LIST = Other
Demands = dict[fx.Node, Form]

RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
SAME = frozenset({aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default})
FILLED = frozenset({aten.full.default})
OF_EVERYTHING: dict[object, str] = {aten.sum.default: "sum", aten.mean.default: "mean"}
ALONG = frozenset({aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default})
"""Operations along one dimension, their second argument, by an index of as many rows."""


LISTS = frozenset({REGION, LOSS_ROWS, LOSS_TARGETS})
"""Operations with several results."""


class NotByRow(Exception):
    """An operation that cannot be computed for some rows alone, and why."""


def shape(node: fx.Node) -> list[int]:
    """Its sizes. Raises NotByRow for what has none, or symbols among them."""
    value = g.tensor(node)
    if value is None or not all(isinstance(n, int) for n in value.shape):
        raise NotByRow(f"{node} is no tensor of known sizes")
    return list(value.shape)


def lead(sizes: Sequence[int], rows: int) -> int:
    """How many of the first sizes are the rows together. Raises NotByRow if none are."""
    for k in range(1, len(sizes) + 1):
        if math.prod(sizes[:k]) == rows:
            return k
    raise NotByRow(f"{[*sizes]} does not begin with {rows} rows")


def demands(node: fx.Node, form: Form, rows: int) -> Demands:
    """What the node reads, and as what, if it is to have this form. Raises NotByRow if it cannot."""
    if form is LIST:
        return _region(node) if node.target is REGION else _loss(node)
    if form is TURNED:
        return {_first(node): Rows(lead(shape(_first(node)), rows))} if _turns(node) else _refuse(node)
    if form is SUMMED:
        return _summed(node, rows)
    assert isinstance(form, Rows)  # others are only read
    sizes = shape(node)
    if len(sizes) < form.lead or math.prod(sizes[: form.lead]) != rows:
        raise NotByRow(f"{node} does not begin with {rows} rows")
    for kinds, rule in RULES:
        if kinds(node):
            return rule(node, form.lead, rows)
    return _refuse(node)


def form_of(user: fx.Node, node: fx.Node, form: Form, rows: int) -> Form:
    """What a reader of a node of this form is. Raises NotByRow if it is nothing of rows."""
    if user.target in LISTS:
        return LIST if demands(user, LIST, rows).get(node) == form else _refuse(user)
    if form is LIST:
        return _item(user)
    for guess in (TURNED, SUMMED) if _turns(user) or form is TURNED else (None, SUMMED):
        try:
            made: Form = guess or Rows(lead(shape(user), rows))
            if demands(user, made, rows).get(node) == form:
                return made
        except NotByRow:
            continue
    _refuse(user)


def _refuse(node: fx.Node) -> NoReturn:
    raise NotByRow(f"{node} is not computed row by row")


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def product_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Both matrices of a product, also of one that leaves in float32; None of another operation."""
    if node.target is aten.mm.default:
        return node.args  # type: ignore[return-value]
    return node.args[1:] if node.target is ADDED_UP and node.args[0] is None else None  # type: ignore[return-value]


def _turns(node: fx.Node) -> bool:
    """Does it transpose a matrix?"""
    return node.target is aten.permute.default and node.args[1] == [1, 0]


def _pointwise(node: fx.Node, k: int, rows: int) -> Demands:
    found = Demands()
    mine = shape(node)
    for source in node.all_input_nodes:
        theirs = shape(source)
        missing = len(mine) - len(theirs)
        first = [1] * missing + theirs
        if first[:k] == mine[:k] and missing < k:
            found[source] = Rows(k - missing)
        elif all(n == 1 for n in first[:k]):
            found[source] = WHOLE
        else:
            found[source] = Spread(tuple(mine[:k]), k - missing)
    return found


def _reshape(node: fx.Node, k: int, rows: int) -> Demands:
    source = _first(node)
    return {source: Rows(lead(shape(source), rows))}


def _same(node: fx.Node, k: int, rows: int) -> Demands:
    return {_first(node): Rows(k)}


def _filled(node: fx.Node, k: int, rows: int) -> Demands:
    return {}


def reduction(node: fx.Node) -> g.Reduction | None:
    """The node as a reduction; one of everything is one, too, but not one of several results of one operation."""
    if node.target is operator.getitem:
        return None
    if (name := OF_EVERYTHING.get(node.target)) and not node.kwargs:
        return g.Reduction(name, _first(node), tuple(range(len(shape(_first(node))))), False)
    return g.reduction(node)


def _reduced(node: fx.Node, k: int, rows: int) -> Demands:
    found = reduction(node)
    assert found is not None
    if min(found.dims) < k:
        raise NotByRow(f"{node} reduces over the rows")
    return {found.source: Rows(k)}


def _along(node: fx.Node, k: int, rows: int) -> Demands:
    dim = node.args[1]
    assert isinstance(dim, int)
    sizes = [shape(source) for source in node.all_input_nodes]
    if dim % len(sizes[0]) < k or any(size[:k] != sizes[0][:k] for size in sizes):
        raise NotByRow(f"{node} goes along the rows")
    return dict.fromkeys(node.all_input_nodes, Rows(k))


def _product(node: fx.Node, k: int, rows: int) -> Demands:
    read = g.operands(node)
    if not read.understood or any(len(shape(bias)) != 1 for bias in read.addends):
        raise NotByRow(f"{node} adds a matrix")
    whole: Demands = dict.fromkeys((read.right, *read.addends), WHOLE)
    return whole | {read.left: Rows(1)}


def _item(node: fx.Node) -> Form:
    """What one of several results is."""
    if _first(node).target is not REGION:
        return Rows(1)
    region = parse(_first(node).args[1])  # type: ignore[arg-type]
    number: int = node.args[1] - len(region.stores)  # type: ignore[operator,assignment]
    return SUMMED if number >= 0 and region.reductions[number].over == "M" else Rows(1)


def _of_region(node: fx.Node, k: int, rows: int) -> Demands:
    return {_first(node): LIST} if _item(node) == Rows(1) else _refuse(node)


def _loss(node: fx.Node) -> Demands:
    if node.target is LOSS_TARGETS:
        return dict.fromkeys(node.all_input_nodes, Rows(1))
    *rows, weight, bias, _ = node.args
    found: Demands = {x: Rows(1) for x in rows if isinstance(x, fx.Node)}
    return found | {x: WHOLE for x in (weight, bias) if isinstance(x, fx.Node)}


def _region(node: fx.Node) -> Demands:
    region = parse(node.args[1])  # type: ignore[arg-type]
    inputs: list[fx.Node] = node.args[0]  # type: ignore[assignment]
    if any(p.a_layout != "mk" for p in region.products):
        raise NotByRow(f"{node} sums over the rows")
    if any(o.extent == "sample" for o in region.operands) or any(r.tokens for r in region.reductions):
        raise NotByRow(f"{node} knows of samples")
    forms: list[Form] = [WHOLE] * len(inputs)
    for product in region.products:
        for a, _ in product.pairs:
            forms[a] = Rows(1)
    for i, operand in enumerate(region.operands, region.matrices):
        forms[i] = WHOLE if operand.extent in ("feature", "scalar") else Rows(1)
    found = Demands()
    for x, form in zip(inputs, forms, strict=True):
        if found.setdefault(x, form) != form:
            raise NotByRow(f"{x} is read by rows, and as it is")
    return found


def _summed(node: fx.Node, rows: int) -> Demands:
    """Of a sum over all rows: a weight's gradient, a bias's, or a Region's sum over the tokens."""
    if node.target is operator.getitem and _first(node).target is REGION:
        return {_first(node): LIST} if _item(node) is SUMMED else _refuse(node)
    if (operands := product_operands(node)) is not None:
        left, right = operands
        if left is not right and _turns(left) and shape(right)[0] == rows:
            return {left: TURNED, right: Rows(1)}
        return _refuse(node)
    found = reduction(node)
    if found is None or found.name not in ("sum", "mean"):
        return _refuse(node)
    k = lead(shape(found.source), rows)
    return {found.source: Rows(k)} if {*range(k)} <= {*found.dims} else _refuse(node)


def _in(targets: frozenset[object]) -> Callable[[fx.Node], bool]:
    return lambda node: node.target in targets


RULES: tuple[tuple[Callable[[fx.Node], bool], Callable[[fx.Node, int, int], Demands]], ...] = (
    (_in(RESHAPES), _reshape),
    (_in(SAME), _same),
    (_in(FILLED), _filled),
    (_in(ALONG), _along),
    (_in(frozenset({aten.mm.default, aten.addmm.default})), _product),
    (lambda n: n.target is operator.getitem and _first(n).target in LISTS, _of_region),
    (lambda n: n.target is aten.expand.default or g.is_pointwise(n) or g.is_cast(n), _pointwise),
    (lambda n: reduction(n) is not None, _reduced),
)
"""How a result in rows is computed of its inputs: the first row whose question a node answers."""
