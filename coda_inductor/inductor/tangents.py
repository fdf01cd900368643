"""How the gradients that come into a backward from outside are expected to lie.

AOTAutograd traces a backward before anybody has handed it a gradient, so it guesses the layout, and at run time copies
what lies otherwise. torch 2.11 guesses contiguous ones. The gradients of q, k and v whose heads were put before the
tokens, which attention's backward returns as they lie, are copied then, only to be put back; of an attention beside
the graph, another graph's or an eager one's. torch 2.13 guesses that they lie as the outputs do (pull request 184922,
https://github.com/pytorch/pytorch/pull/184922), and so does this backend. A wrong guess costs a copy, never a wrong
result.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coda_inductor.core.settings import Settings
from coda_inductor.inductor.switches import LAYOUTS, NAMES, allowed

LOCAL_MAP = "local_map_hop"
"""Its outputs have other sizes outside than inside: torch 2.11 would expect gradients of the wrong ones."""


def as_outputs(gm: fx.GraphModule, settings: Settings) -> bool:
    """Shall AOTAutograd expect the gradients of Dynamo's graph in the layout of its outputs?

    Where the user or torch says so already; and else if an output that needs a gradient is permuted. But not where one
    is other than dense: into an expanded one no gradient can be copied, and one with holes is seldom what a gradient
    looks like. Nor where the graph itself reads a permuted one, as keys and values that are returned for a cache: those
    get none as a rule, for which autograd makes zeros, which are contiguous.
    """
    if functorch_config.guess_tangent_strides_as_outputs:
        return True
    if not allowed(LAYOUTS, NAMES, settings):
        return False
    if any(isinstance(n.target, HigherOrderOperator) and n.target.name() == LOCAL_MAP for n in gm.graph.nodes):
        return False
    returned = gm.graph.output_node().all_input_nodes
    values = [n.meta.get("example_value") for n in returned]
    if not all(map(_known, values)):
        return False
    outputs = [(n, t) for n, t in zip(returned, values, strict=True) if isinstance(t, Tensor) and t.requires_grad]
    permuted = [n for n, t in outputs if not t.is_contiguous()]
    return bool(permuted) and all(_dense(t) for _, t in outputs) and all(len(n.users) == 1 for n in permuted)


def _known(value: object) -> bool:
    """Is it a plain tensor whose sizes are numbers, or none at all?"""
    if not isinstance(value, Tensor):
        return value is not None
    plain = value.layout == torch.strided and not is_traceable_wrapper_subclass(value)
    return plain and all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _dense(t: Tensor) -> bool:
    """Does each of its elements have a place of its own, with no other place between them?"""
    last = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != last:
            return False
        last *= size
    return True
