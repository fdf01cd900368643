"""Is what a graph computes of scores the softmax of attention, and its gradient? Both are computed, of a few random
numbers in float64, and compared.

How a softmax is spelled does not matter then: with a maximum or without, with a quotient or a reciprocal. All tensors
of scores have the same few samples, queries and keys; views change nothing, so they are not computed. The operations
that are read (scores.py) are analytic but for a maximum and for choices by masks. Two analytic functions that agree at
a random point are equal, as polynomials are (Schwartz and Zippel); and masks hide some keys of a row, none, all, and
all of some rows, each beside each of two others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.attention.repeats import Dims
from coda_inductor.attention.scores import Scores, added
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Misfit
from coda_inductor.patterns.constants import constant
from coda_inductor.patterns.graph import aten, prims

FEW = 2, 3, 5
"""Samples, queries and keys of the random numbers."""
CLOSE = 1e-9
"""Of the largest number in float64: far from what rounding does, and from what another equation would."""
SOME, NONE, ALL, ROWS = range(4)
"""Which keys a mask hides or shows: some of each row, none, all, or all of some rows."""


@dataclass(frozen=True, slots=True)
class Added:
    """A tensor that is added to scores, times a number, and the axes of its dimensions."""

    node: fx.Node
    dims: Dims
    times: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """A mask: where it is `where`, a score is `value`."""

    node: fx.Node
    dims: Dims
    where: bool
    value: float


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a softmax is taken of: products of queries and keys times `scale`, with `parts` added or put in their place,
    the last one first."""

    scale: float
    parts: tuple[Added | Hidden, ...]

    @classmethod
    def of(cls, scores: Scores) -> Softmax:
        """Raises Misfit where it is something else."""
        taken = [r.source for n in scores.own if (r := g.reduction(n)) is not None and r.name == "max"]
        taken += [n.all_input_nodes[0] for n in scores.own if n.target is aten.exp.default]
        node = min(taken, default=scores.first)
        scale, parts = 1.0, list[Added | Hidden]()
        while node.target not in (aten.bmm.default, aten.baddbmm.default):
            node, by, found = step(scores, node)
            parts += [
                Added(p.node, p.dims, p.times * scale) if isinstance(p, Added) else scaled(p, scale) for p in found
            ]
            scale *= by
        if node is not scores.first:
            raise Misfit("scores of other products")
        by, beta = (known(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        if (addend := added(node)) is not None:
            parts.append(Added(addend, scores.others[addend], beta * scale))
        scale *= by
        if not 0 < scale < math.inf:
            raise Misfit("scores that are multiplied by no positive number")
        return cls(scale, tuple(parts))

    def value(self, products: Tensor, values: Mapping[fx.Node, Tensor]) -> Tensor:
        """The weights, by the definition."""
        scores = products * self.scale
        for part in reversed(self.parts):
            if isinstance(part, Added):
                scores = scores + part.times * values[part.node]
            else:
                scores = torch.where(values[part.node] == part.where, part.value, scores)
        return scores.softmax(-1)


def scaled(mask: Hidden, by: float) -> Hidden:
    """What a mask puts in the place of a score that is multiplied by a positive number afterwards."""
    if by <= 0:
        raise Misfit("scores that are multiplied by no positive number")
    return Hidden(mask.node, mask.dims, mask.where, mask.value * by)


def step(scores: Scores, node: fx.Node) -> tuple[fx.Node, float, list[Added | Hidden]]:
    """Of a node that is computed of scores element by element: of which scores, by which number they are multiplied,
    and what else is done to them. Raises Misfit of what is not linear in them."""
    inner = [n for n in node.all_input_nodes if n in scores.own]
    if len(inner) != 1:
        raise Misfit("scores that are computed of several others")
    ((source,), args) = inner, tuple[Any, ...](node.args)
    if g.is_view(node) or g.is_cast(node):
        return source, 1.0, []
    if node.target is aten.where.self:
        mask, there, elsewhere = args
        where = there is not source
        return source, 1.0, [Hidden(mask, dims(scores, mask), where, known(there if where else elsewhere))]
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and args[0] is source:
        by = known(args[1])
        if by == 0:
            raise Misfit("scores that are multiplied by no positive number")
        return source, by if "mul" in str(node.target) else 1 / by, []
    if node.target is aten.mul.Tensor:
        return source, known(args[0]), []
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and (args[0] is source or node.target is aten.add.Tensor):
        other = args[1] if args[0] is source else args[0]
        if not isinstance(other, fx.Node) or node.kwargs:
            raise Misfit("a number that is added to scores")
        return source, 1.0, [Added(other, dims(scores, other), 1.0 if node.target is aten.add.Tensor else -1.0)]
    raise Misfit(f"scores that are read by {g.name_of(node)} before their softmax")


def dims(scores: Scores, node: fx.Node) -> Dims:
    """The axes of what is computed with scores."""
    if node not in scores.others:
        raise Misfit("scores that are computed of several others")
    return scores.others[node]


def known(value: Any) -> float:
    """A number that the graph holds. Raises Misfit of one that is computed of inputs."""
    if isinstance(value, fx.Node):
        found = g.tensor(value)
        there = constant(value, frozenset(), 1 << 10) if found is not None and found.numel() == 1 else None
        if there is None:
            raise Misfit("scores that are multiplied by what only a run knows")
        with unset_fake_temporarily():
            return float(there)
    if not isinstance(value, (int, float)) or math.isnan(value):
        raise Misfit("scores that are multiplied by what only a run knows")
    return float(value)


# ---- computing with a few numbers


@dataclass(frozen=True, slots=True)
class Numbers:
    """What tensors of scores are if products, and what comes from elsewhere, are random numbers; what the weights are
    by the definition; and the gradient of the products over the scale, None if there is no backward."""

    of: Mapping[fx.Node, Tensor]
    weights: Tensor
    gradient: Tensor | None

    @classmethod
    def drawn(cls, scores: Scores, softmax: Softmax, products: Sequence[fx.Node], case: int) -> Numbers:
        """Of a case: which keys the masks hide."""
        random = torch.Generator().manual_seed(case)
        first, *rest = (torch.randn(FEW, generator=random, dtype=torch.float64) for _ in products)
        found, masks = dict[fx.Node, Tensor](zip(products, (first, *rest), strict=True)), 0
        for node, its in scores.others.items():
            if node not in scores.own:
                found[node] = other(scores, node, its, random, case // 4**masks % 4)
                masks += node.meta["val"].dtype == torch.bool
        alpha, beta = (scores.first.kwargs.get(name, 1) for name in ("alpha", "beta"))
        if scores.first.target is aten.baddbmm.default:
            addend = added(scores.first)
            found[scores.first] = alpha * first  # type: ignore[operator, assignment]
            if addend is not None:
                found[scores.first] += beta * found[addend]  # type: ignore[operator, arg-type]
        for node in sorted(n for n in scores.own if n not in found):
            found[node] = value(node, found)
        leaf = first.clone().requires_grad_()
        with torch.enable_grad():
            weights = softmax.value(leaf, found)
            gradient = torch.autograd.grad((weights * rest[0]).sum(), leaf)[0] / softmax.scale if rest else None
        return cls(found, weights.detach(), gradient)

    @property
    def known(self) -> Tensor:
        """The rows that have numbers: of those whose every key minus infinity hides nothing is said."""
        return ~self.weights.isnan().any(-1)

    def is_weights(self, node: fx.Node) -> bool:
        """Is the node the weights? Where these are no numbers, it must not be one."""
        made = self.of[node].expand(FEW)
        return close(made, self.weights, 1.0) and bool((made.isnan() == self.weights.isnan()).all())

    def times(self, node: fx.Node, like: Tensor) -> float | None:
        """How often the node is such numbers, as far as rows have numbers; None if they are all 0."""
        made, like = self.of[node].expand(FEW)[self.known], like[self.known]
        square = float((like * like).sum())
        return float((made * like).sum()) / square if square else None

    def agrees(self, node: fx.Node, like: Tensor, times: float | None) -> bool:
        """Is the node so often these numbers, or 0 as they are?"""
        return close(self.of[node].expand(FEW)[self.known], like[self.known], times or 0.0)


def cases(scores: Scores) -> range:
    """All that masks may do, each beside each of three; any others hide some keys of each row."""
    masks = sum(n.meta["val"].dtype == torch.bool for n in scores.others if n not in scores.own)
    return range(max(2, 4 ** min(masks, 3)))


def close(made: Tensor, like: Tensor, times: float) -> bool:
    """Are these, but for rounding, where they are numbers?"""
    there = ~like.isnan()
    made, like = made[there], times * like[there]
    most = float(torch.cat([made, like]).abs().max()) if made.numel() else 0.0
    return bool(((made - like).abs() <= CLOSE * most).all())


def other(scores: Scores, node: fx.Node, its: Dims, random: torch.Generator, hides: int) -> Tensor:
    """A number that the graph holds, or random numbers; a mask hides as it is told."""
    dtype = node.meta["val"].dtype
    if dtype != torch.bool:
        try:
            return torch.tensor(known(node), dtype=torch.float64)
        except Misfit:
            pass
    axes = {i for dim in its for i in scores.axes.roots(dim)}
    there = [not axes.isdisjoint(scores.axes.roots([i])) for i in (scores.apart, scores.queries, scores.keys)]
    shape = [few if has else 1 for few, has in zip(FEW, there, strict=True)]
    found = torch.randn(shape, generator=random, dtype=torch.float64)
    if dtype.is_floating_point:
        return found
    if dtype != torch.bool:
        return (found > 0).long()
    if hides == SOME:
        return found > (found.median(-1, keepdim=True).values if there[-1] else 0)
    if hides == ROWS:
        return (found[..., :1] > 0).expand(shape)
    return torch.full(shape, hides == ALL)


def value(node: fx.Node, found: Mapping[fx.Node, Tensor]) -> Tensor:
    """What a node is, of what its inputs are."""
    if g.is_view(node):
        return found[node.all_input_nodes[0]]
    if (reduction := g.reduction(node)) is not None:
        source = found[reduction.source]
        source = source.expand(*source.shape[:-1], FEW[-1])  # or the sum of what is repeated for all keys
        return source.sum(-1, keepdim=True) if reduction.name == "sum" else source.amax(-1, keepdim=True)
    if node.target is prims.convert_element_type.default:
        return found[node.all_input_nodes[0]].double()
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found[n])
    return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]
