"""The operations of attention, forward and backward, by the names of their arguments: torch has one for each kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.ops.attention import WINDOWED, WINDOWED_BACKWARD
from coda_inductor.patterns import graph as g

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
