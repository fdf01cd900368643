"""What the lift asks of an FX node: its tensor, dtype, sizes, source line, and whether it only rearranges."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.core import reductions
from coda_inductor.core.dtypes import NARROW
from coda_inductor.patterns.sizes import ONE, Size, size_of

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS: frozenset[object] = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default,
})  # fmt: skip
"""Operations that keep every value and change only its layout."""
COPIES: frozenset[object] = frozenset({aten.clone.default, aten.contiguous.default})
"""Those of them whose result is memory of its own."""

LOOPS: frozenset[object] = frozenset({aten.var_mean.correction})
"""Operations that Inductor makes a loop of although they are no single value."""

SCALED: frozenset[object] = frozenset({aten._scaled_mm.default, aten._scaled_mm_v2.default})
"""Products of 8-bit operands, whose results are multiplied by both operands' scales."""
MATRIX_PRODUCTS: frozenset[object] = frozenset({aten.mm.default, aten.addmm.default}) | SCALED
"""Products that may become Regions."""
PRODUCTS: frozenset[object] = MATRIX_PRODUCTS | {aten.bmm.default}
"""All that are read as contractions."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What a product reads: `left` [.., M, K] and `right` [.., K, N]; `addends` to the result, as addmm has; and
    `scales`, numbers or vectors that the result is multiplied by before. `fast`: 8-bit operands may be added up in the
    tensor cores' own accumulators. `understood`: nothing else is asked of it."""

    left: fx.Node
    right: fx.Node
    addends: tuple[fx.Node, ...] = ()
    scales: tuple[fx.Node, ...] = ()
    fast: bool = False
    understood: bool = True


BY_TENSOR_OR_ROW = (0, 1)  # torch.nn.functional.ScalingType


def operands(node: fx.Node) -> Operands:
    """What one of the PRODUCTS reads."""
    args: tuple[Any, ...] = node.args
    if node.target not in SCALED:
        *terms, left, right = (a for a in args if isinstance(a, fx.Node))  # mm.dtype also has a dtype
        plain = bool(node.kwargs.get("alpha", 1) == 1 and node.kwargs.get("beta", 1) == 1)
        return Operands(left, right, tuple(terms), understood=plain)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, args, strict=False)) | node.kwargs
    scales = [given["scale_a"], given["scale_b"]]
    plain = not given.get("scale_result") and not given.get("contraction_dim")
    if node.target is aten._scaled_mm_v2.default:
        plain &= all(len(some) == 1 for some in scales) and all(
            kind in BY_TENSOR_OR_ROW for side in "ab" for kind in given[f"recipe_{side}"]
        )
        scales = [some[0] for some in scales]
    addends = () if given.get("bias") is None else (given["bias"],)
    fast = bool(given.get("use_fast_accum"))
    return Operands(args[0], args[1], addends, (scales[0], scales[1]), fast, plain and _by_row(node, scales))


def like(a: fx.Node, b: fx.Node) -> bool:
    """Do two products read operands of the same dtypes, and add them up alike?"""
    mine, theirs = operands(a), operands(b)
    pairs = ((mine.left, theirs.left), (mine.right, theirs.right))
    return mine.fast == theirs.fast and all(tensor(x).dtype == tensor(y).dtype for x, y in pairs)  # type: ignore[union-attr]


def _by_row(node: fx.Node, scales: Sequence[fx.Node]) -> bool:
    """Is each scale one float32 number, or one for each row or column of a product?"""
    found = [tensor(s) for s in scales]
    if any(t is None or t.dtype != torch.float32 for t in found):
        return False
    m, n = sizes(node)
    shapes = [sizes(s) for s in scales]
    one = [all(size == ONE for size in shape) for shape in shapes]
    return (one[0] or shapes[0] == (m, ONE)) and (one[1] or shapes[1] == (ONE, n))


def copied(graph: fx.Graph) -> fx.Graph:
    """The graph again, with its nodes' meta. copy.deepcopy also copies how a graph is printed as Python, of which torch
    2.13 warns whoever compiles: its own pytree.LeafSpec is deprecated."""
    twin, nodes = fx.Graph(tracer_cls=graph._tracer_cls), dict[fx.Node, fx.Node]()
    results = twin.graph_copy(graph, nodes)
    twin.output(results).meta = dict(graph.output_node().meta)
    twin.set_codegen(graph._codegen)
    return twin


def name_of(node: fx.Node) -> str:
    """The name of an operation without its namespace and overload, "" of what has no schema."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def tensor(node: object) -> torch.Tensor | None:
    """The node's fake tensor, None if it has no single one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def sizes(node: fx.Node) -> tuple[Size, ...]:
    """The node's sizes."""
    value = tensor(node)
    assert value is not None
    return tuple(size_of(n) for n in value.shape)


def floating(node: fx.Node) -> bool:
    """Is the node one real floating-point tensor with at least one element, as far as is known?"""
    value = tensor(node)
    return value is not None and value.dtype.is_floating_point and all(s.static != 0 for s in sizes(node))


def precision(node: fx.Node) -> torch.dtype | None:
    """What a node's values are computed in: float32 for the dtypes that epilogues widen to it, else the dtype itself.
    None if it is no single floating-point tensor."""
    value = tensor(node)
    if value is None or not value.dtype.is_floating_point:
        return None
    return torch.float32 if value.dtype in NARROW else value.dtype


@dataclass(frozen=True, slots=True)
class Reduction:
    """A node that reduces `source` over `dims`: a row of core/reductions.py, "mean" or "var", which divides by the
    count less `correction`."""

    name: str
    source: fx.Node
    dims: tuple[int, ...]
    keepdim: bool
    correction: float = 0.0


def aten_of(name: str) -> Any:
    """The operation aten.`name`, "packet.overload"."""
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


REDUCTIONS = {aten.mean.dim: "mean", aten.var.correction: "var"}
REDUCTIONS |= {aten_of(row.aten): name for name, row in reductions.REDUCTIONS.items()}


def reduction(node: fx.Node) -> Reduction | None:
    """The node as a reduction; an item of var_mean is one, too. None if it is none, or has a dtype of its own."""
    op = node
    if node.target is operator.getitem and node.args[0].target is aten.var_mean.correction:  # type: ignore[union-attr]
        op = node.args[0]  # type: ignore[assignment]
        name = "mean" if node.args[1] else "var"
    elif node.target in REDUCTIONS:
        name = REDUCTIONS[node.target]
    else:
        return None
    options: dict[str, Any] = dict(op.kwargs)
    correction = options.pop("correction", 1)
    source, over, *rest = (*op.args, options.pop("dim", None))[: max(2, len(op.args))]
    keepdim = bool(options.pop("keepdim", rest[0] if rest else False))
    if options or not isinstance(source, fx.Node) or tensor(source) is None:
        return None
    rank = len(sizes(source))
    dims = tuple(int(i) % rank for i in over) if over and rank else tuple(range(rank))
    return Reduction(name, source, dims, keepdim, float(1 if correction is None else correction))


BY_SIGN: dict[object, str] = {
    aten.gt.Scalar: "if_positive", aten.le.Scalar: "if_nonpositive",
    aten.lt.Scalar: "if_negative", aten.ge.Scalar: "if_nonnegative",
}  # fmt: skip
"""Comparisons, with 0, to the operations that choose by them."""


def choice(node: fx.Node) -> tuple[str, list[fx.Node]] | None:
    """(operation, [value, x, y]) if the node is x where a value compares with 0 so, and y elsewhere,
    as the gradient of ReLU is. An epilogue has not rounded what it compares, and rounding turns no sign round (it may
    give 0): so no other number is compared with. Of a backward only what chooses of a product's gradient: no epilogue
    could make another, and its axes say nothing new."""
    condition = node.args[0] if node.target is aten.where.self else None
    if not isinstance(condition, fx.Node) or condition.target not in BY_SIGN or condition.args[1] != 0:
        return None
    value, (x, y) = condition.args[0], node.args[1:]
    if not all(isinstance(a, fx.Node) and floating(a) and precision(a) == precision(node) for a in (value, x, y)):
        return None
    if is_backward(node) and not any(n.target in PRODUCTS for n in reached([x, y], _within_backward)):  # type: ignore[list-item]
        return None
    return BY_SIGN[condition.target], [value, x, y]  # type: ignore[list-item]


def _within_backward(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs of a node that are of the backward, up to products."""
    return () if node.target in PRODUCTS else filter(is_backward, node.all_input_nodes)


def source_line(node: fx.Node) -> str:
    """The innermost line "file:line" outside torch and torchao that made the node; empty if unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [(f, n) for f, n in frames if not re.search("/torch(ao)?/", f)]
    return "{}:{}".format(*(mine or frames)[-1]) if frames else ""


def root(node: fx.Node, through: Callable[[fx.Node], bool]) -> fx.Node:
    """Follows first arguments while `through` holds."""
    while through(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def reached(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes to start from, and all to which others lead `onward`."""
    todo, found = list(start), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += onward(node)
    return found


def is_joint(graph: fx.Graph) -> bool:
    """Does the graph hold a forward and its backward?"""
    return any(map(is_tangent, graph.nodes))


def is_tangent(node: fx.Node) -> bool:
    """Is the node the gradient of an output, which exists only once the forward is over?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_view(node: fx.Node) -> bool:
    """Does the node only rearrange its first argument? A slice of everything does, too."""
    if node.op != "call_function":
        return False
    whole = node.target is aten.slice.Tensor and tensor(node) is not None and sizes(node) == sizes(node.args[0])  # type: ignore[arg-type]
    return whole or node.target in VIEWS


def is_pointwise(node: fx.Node) -> bool:
    """Does it compute element by element, and draw nothing?"""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def compares(node: fx.Node) -> bool:
    """Does it ask for equal bits? The gradient of a largest value is that of the values that equal it; if none does,
    0 / 0."""
    return node.target is aten.eq.Tensor


def is_cast(node: fx.Node) -> bool:
    """Does the node only change its first argument's dtype?"""
    return node.op == "call_function" and node.target in (prims.convert_element_type.default, aten._to_copy.default)


def widens(node: fx.Node) -> bool:
    """Is the node a cast to a wider dtype? Whoever reads it can do that itself, from half the bytes."""
    if not is_cast(node) or (narrow := tensor(node.all_input_nodes[0])) is None:
        return False
    return narrow.dtype.itemsize < tensor(node).dtype.itemsize  # type: ignore[union-attr]


def only_rounded(node: fx.Node) -> bool:
    """Is the node read only by casts to a narrower floating-point dtype, through views perhaps?"""
    size = tensor(node).dtype.itemsize  # type: ignore[union-attr]

    def rounds(user: fx.Node) -> bool:
        if is_view(user):
            return only_rounded(user)
        dtype = tensor(user).dtype if is_cast(user) else None  # type: ignore[union-attr]
        return dtype is not None and dtype.is_floating_point and dtype.itemsize < size

    return bool(node.users) and all(map(rounds, node.users))


def wider(node: fx.Node) -> bool:
    """Does the node only widen a tensor, and perhaps rearrange it?"""
    return tensor(narrow(node)).dtype.itemsize < tensor(node).dtype.itemsize  # type: ignore[union-attr]


def narrow(node: fx.Node) -> fx.Node:
    """The tensor that the node only widens, and rearranges."""
    return root(node, lambda n: is_view(n) or widens(n))


LAID_OUT_AS = "coda_laid_out_as"
"""Of an item of a list that an operation of ours returns: which of its inputs has its axes, and whether they are
swapped. In a node's meta."""


def laid_out_as(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """The tensor of two dimensions that has the axes of an item of an operation's list, and are they swapped?"""
    if node.target is not operator.getitem or LAID_OUT_AS not in node.meta:
        return None
    index, swapped = node.meta[LAID_OUT_AS]
    return node.args[0].args[0][index], swapped  # type: ignore[union-attr,index,return-value]


def is_weight(node: fx.Node) -> bool:
    """Is the node an input of the graph, up to layout and dtype?"""
    return root(node, lambda n: is_view(n) or is_cast(n)).op in ("placeholder", "get_attr")


def is_row(node: fx.Node) -> bool:
    """Is the node a product of a single row, as of the condition of one image? No epilogue is made for it: what others
    read of it are vectors over features."""
    return node.target in MATRIX_PRODUCTS and sizes(node)[0] == ONE


def reads_weight(product: fx.Node) -> bool:
    """Does the product multiply rows of tokens with an input? (A weight's gradient may multiply with one too: the
    first layer's.)"""
    right = operands(product).right
    return is_weight(root(right, _cast_to_8_bits) if product.target in SCALED else right) and not is_weight_gradient(
        product
    )


def _cast_to_8_bits(node: fx.Node) -> bool:
    """Is the node part of what computes an 8-bit tensor of its first argument?"""
    return node.op == "call_function" and (is_view(node) or is_cast(node) or node.target in SCALING)


SCALING = frozenset({aten.mul.Tensor, aten.clamp_min.default, aten.clamp_max.default})


SIDE = "partitioner_tag"
"""Where AOTAutograd keeps the side of a joint graph that a node belongs to."""
IN_BACKWARD = "must_be_in_backward"
"""The side of what the partitioner may not move into the forward, to keep what it makes."""


def is_backward(node: fx.Node) -> bool:
    """Does the node belong to the backward of a joint graph?"""
    return node.meta.get(SIDE) in ("is_backward", IN_BACKWARD)


def is_weight_gradient(product: fx.Node) -> bool:
    """Is the product one of the backward whose left operand is read column by column, as dZ of dW = dZ^T X is?"""
    return is_backward(product) and size_of(operands(product).left.meta["val"].stride()[-1]) != ONE
