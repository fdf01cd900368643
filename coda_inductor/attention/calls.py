"""The operations of attention, forward and backward, by the names of their arguments: torch has one for each kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend

from coda_inductor.ops.attention import WINDOWED, WINDOWED_BACKWARD
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten

MASKS = ("attn_bias", "attn_mask")
"""What the operations call the mask."""
FLAG = "is_causal"
OPERANDS = ("query", "key", "value")
WINDOWS = (WINDOWED, WINDOWED_BACKWARD)
"""The operations that say which keys a token sees by two numbers."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of attention."""

    node: fx.Node

    @property
    def given(self) -> dict[str, Any]:
        """The node's arguments, as they are now, by name, with the defaults of those that are not given."""
        arguments = self.node.target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        return given | dict(zip((a.name for a in arguments), self.node.args, strict=False)) | self.node.kwargs

    @property
    def masked_by(self) -> str | None:
        """What this operation calls the mask; None if it takes none."""
        return next((name for name in MASKS if name in self.given), None)

    @property
    def mask(self) -> Any:
        """The mask that it reads; None if it reads none."""
        return self.given[self.masked_by] if self.masked_by else None

    @property
    def scale(self) -> float:
        """What it multiplies the products of queries and keys by."""
        given = self.given.get("scale")
        return float(self.given["query"].meta["val"].shape[-1] ** -0.5 if given is None else given)

    @property
    def gradient(self) -> Any:
        """The gradient of the result that a backward reads; None for a forward."""
        return self.given.get("grad_out", self.given.get("grad_out_"))

    @property
    def is_backward(self) -> bool:
        """Does it give gradients?"""
        return self.gradient is not None

    def arguments(self, **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the same operation with some changed, by place and by name."""
        given = self.given | changed
        arguments = self.node.target._schema.arguments  # type: ignore[union-attr]
        args = tuple(given[a.name] for a in arguments if not a.kwarg_only)
        return args, {a.name: given[a.name] for a in arguments if a.kwarg_only}


def attention(graph: fx.Graph) -> Iterator[Call]:
    """The operations of attention, in the order of the graph."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "coda"):
            arguments = node.target._schema.arguments
            names = {a.name for a in arguments}
            if names.issuperset(OPERANDS) and (FLAG in names or node.target in WINDOWS):
                call = Call(node)
                if all(g.tensor(call.given[name]) is not None for name in OPERANDS):
                    yield call


# ---- the kernels that are asked for where there was another

WIDEST, STEP = 256, 8
"""Numbers in a head: the most that cuDNN takes on a Hopper, and in which steps."""
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
"""The memory-efficient kernel: it alone has a mask's gradient."""
SAVED, SAVED_BY_EFFICIENT = (0, 1, 6, 7), (0, 1, 2, 3)
"""Which results of cuDNN's forward, and of that kernel's, its backward reads: the result, the sums of exponentials, and
a seed and an offset."""


def padded(width: int) -> int:
    """So many numbers of a head are enough for so many features."""
    return -(-width // STEP) * STEP


def chosen(query: Tensor, key: Tensor, value: Tensor, width: int, trained: bool) -> bool:
    """Does torch choose cuDNN here for one head of queries and keys of this width? torch knows by tensors that are
    there. (What `sdpa_kernel` allows within a compiled function is not seen here. Where there is no GPU, we explain
    what a Hopper would do.)"""
    if query.device.type != "cuda" or not torch.cuda.is_available():
        return True
    with unset_fake_temporarily():
        how: Any = {"dtype": query.dtype, "device": query.device, "requires_grad": trained}
        shapes = (query.shape[-2], width), (key.shape[-2], width), value.shape[-2:]
        one = [torch.empty(1, 1, *shape, **how) for shape in shapes]
        return bool(torch._fused_sdp_choice(*one) == SDPBackend.CUDNN_ATTENTION.value)  # type: ignore[arg-type]
