"""How the gradients that come into a backward from outside are expected to lie.

AOTAutograd traces a backward before anybody has handed it a gradient, so it guesses the layout, and at run time copies
what lies otherwise. torch 2.11 guesses contiguous ones. Attention beside the graph, another graph's or an eager one's,
returns the gradients of q, k and v as they lie, by token: they are copied then, only to be put back. torch 2.13 guesses
that gradients lie as the outputs do (an option since https://github.com/pytorch/pytorch/pull/144579), and so does this
backend where outputs look like q, k and v. A wrong guess costs a copy: fused attention reads by token and so do
elementwise operations, but matrix products and a softmax return contiguous gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coda_inductor.core.settings import Settings
from coda_inductor.passes.switches import LAYOUTS, NAMES, allowed

LOCAL_MAP = "local_map_hop"
"""Its outputs have other sizes outside than inside: torch 2.11 would expect gradients of the wrong ones."""


def as_outputs(gm: fx.GraphModule, settings: Settings) -> bool:
    """Shall AOTAutograd expect the gradients of Dynamo's graph in the layout of its outputs?

    Where torch says so already, or the user; else if outputs that need a gradient lie by token (`_by_token`) and all
    others of these are contiguous: no gradient can be copied into an expanded one. Not where the graph itself reads one
    of them, as keys and values that are returned for a cache: those get no gradient as a rule, for which autograd makes
    zeros, which are contiguous. (torch 2.13 with its default taken back by the user is taken for torch 2.11.)
    """
    if functorch_config.guess_tangent_strides_as_outputs:
        return True
    if not allowed(LAYOUTS, NAMES, settings) or any(map(_calls_local_map, gm.modules())):
        return False
    returned = gm.graph.output_node().all_input_nodes
    values = [n.meta.get("example_value") for n in returned]
    if not all(map(_known, values)):
        return False
    outputs = [(n, t) for n, t in zip(returned, values, strict=True) if isinstance(t, Tensor) and t.requires_grad]
    turned = [(n, t) for n, t in outputs if not t.is_contiguous()]
    return bool(turned) and all(_by_token(t) and not _is_read(n, t) for n, t in turned)


def _by_token(t: Tensor) -> bool:
    """Is it [batch, heads, tokens, size], of which tokens lie before heads?"""
    return t.dim() == 4 and t.is_floating_point() and t.transpose(1, 2).is_contiguous()


def _calls_local_map(module: torch.nn.Module) -> bool:
    """Is it a graph that calls LOCAL_MAP?"""
    targets = [n.target for n in module.graph.nodes] if isinstance(module, fx.GraphModule) else []
    return any(isinstance(target, HigherOrderOperator) and target.name() == LOCAL_MAP for target in targets)


def _known(value: object) -> bool:
    """Is it a plain tensor whose sizes are numbers, or none at all?"""
    if not isinstance(value, Tensor):
        return value is not None
    if is_traceable_wrapper_subclass(value):
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _is_read(node: fx.Node, value: Tensor) -> bool:
    """Does the graph use a returned tensor, or another view of what it is a view of?"""
    storage = StorageWeakRef(value.untyped_storage())

    def shares(other: fx.Node) -> bool:
        t = other.meta.get("example_value")
        return isinstance(t, Tensor) and _known(t) and StorageWeakRef(t.untyped_storage()) == storage

    views, todo = set[fx.Node](), [node]
    while todo:
        views.add(view := todo.pop())
        todo += [n for n in (*view.all_input_nodes, *view.users) if n not in views and shares(n)]
    return any(n not in views and n.op != "output" for view in views for n in view.users)
