"""What the stages of attention tell of what they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from coda_inductor.patterns import graph as g


@dataclass(frozen=True, slots=True)
class Changed:
    """Attention that is asked for otherwise.

    `node` and `shape`: the attention's, and its queries'; or those of the mask, or of the scores, that nobody makes any
    more. `what` happened, for people. `source`: the user's line. `absorbed`: the operations that nobody runs any more,
    of the backward, too. `heads`: how many share keys and values, else 1. `features`: how many a mask is, else 0."""

    node: str
    shape: str
    what: str
    source: str
    absorbed: tuple[str, ...] = ()
    heads: int = 1
    features: int = 0

    @property
    def name(self) -> str:
        """Its own, among those who absorb operations."""
        return f"attention {self.node}"

    @classmethod
    def of(
        cls, node: fx.Node, shaped: fx.Node, what: str, gone: Sequence[str], heads: int = 1, features: int = 0
    ) -> Changed:
        """The record of a change of `node`, whose shape another node shows."""
        shape = str([*shaped.meta["val"].shape])
        return cls(node.name, shape, what, g.source_line(node), tuple(gone), heads, features)
