"""One graph on its way through the stages of the pipeline (joint.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.attention.changes import Changed
from coda_inductor.attention.masks import Mask
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.records import Refusal, Site
from coda_inductor.passes.blocks import Blocks
from coda_inductor.passes.casts import Cast
from coda_inductor.passes.elementwise import Pass
from coda_inductor.passes.parts import Packed
from coda_inductor.passes.switches import NAMES, allowed
from coda_inductor.passes.tables import Table
from coda_inductor.tuning.verdicts import Decisions
from coda_inductor.write.verifying import Before


@dataclass(slots=True)
class Work:
    """One graph on its way through the stages: what they share, and what they leave for the report."""

    module: fx.GraphModule
    settings: Settings
    target: str
    decisions: Decisions
    before: Before
    original: fx.Graph
    """The graph as it was."""
    device: torch.device | None
    """Where the graph's products run; None if it has none."""
    whole: frozenset[str] = frozenset()
    """The products that stay whole though they are read in parts, or read what is put beside each other; and those of
    which a loss stays as it came."""
    unread: frozenset[str] = frozenset()
    """The nodes that the backward would keep for sums alone, which therefore do not read them."""
    lent: frozenset[int] = frozenset()
    """The results, by their places, that the caller may overwrite before the backward runs: it must not read them."""
    alone: Mapping[str, bool] = field(default_factory=dict)
    """Those that it keeps for sums alone, and whether that pays (`kept_alone`)."""
    packed: tuple[Packed, ...] = ()
    """Those that were split."""
    joined: tuple[Packed, ...] = ()
    """Those that were split because their left operand is two tensors beside each other."""
    losses: tuple[Cast, ...] = ()
    """Products of a head whose epilogue is to make the gradient of their scores."""
    sites: list[Site] = field(default_factory=list)
    refused: tuple[Refusal, ...] = ()
    opaque: tuple[Refusal, ...] = ()
    tables: tuple[Table, ...] = ()
    casts: tuple[Cast, ...] = ()
    elementwise: tuple[Pass, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    masks: tuple[Mask, ...] = ()
    grouped: tuple[Changed, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The graph as it is now."""
        return self.module.graph

    def may(self, name: str) -> bool:
        """Is a pass switched on?"""
        return allowed(name, NAMES, self.settings)
