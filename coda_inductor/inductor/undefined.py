"""The gradient of a large output that no gradient reaches is no tensor of zeros.

transformers' models return the scores beside the loss. Who calls `.loss.backward()` gives the scores no gradient: for
autograd it is undefined. AOTAutograd's backward takes a tensor for it all the same, so autograd makes one of zeros, and
the backward adds it to the gradient of the loss. At 8192 tokens and a vocabulary of 128256 those are 2 GB, written once
and read once. Here the compiled graph returns the scores without a gradient, and beside them a key (ops/gradients.py).
Outside of the graph the scores are tied to the key. If a gradient reaches them, it is handed in by it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coda_inductor.core.settings import Settings
from coda_inductor.ops.gradients import ADD_GRADIENT_OF, GRADIENT_KEY, GRADIENT_OF, HAND_IN
from coda_inductor.passes.switches import NAMES, UNDEFINED, allowed
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.sizes import assumed

LARGE = 1 << 26
"""Bytes of an output from which on this is done. To write and read 64 MiB takes an H100 40 us; a key takes about as
long on the host."""


class Tied(torch.autograd.Function):
    """A graph's output without a gradient, its key and number -> the output with one, which is handed in by the key."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, number: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(number)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        (gradient,), (number,) = gradients, ctx.saved_tensors
        return None if gradient is None else HAND_IN(gradient, number), None, None


tie: Callable[[Tensor, Tensor, Tensor], Tensor] = Tied.apply


@dataclass(frozen=True, slots=True)
class Detached:
    """Dynamo's graph while some of its outputs, at `places`, have no gradient. It returns a key and a number for each
    of them, behind all outputs."""

    gm: fx.GraphModule
    places: Sequence[int]
    original: tuple[Any, ...]
    added: Sequence[fx.Node]

    def restore(self) -> None:
        """Makes the graph what it was."""
        self.gm.graph.output_node().args = self.original
        for node in reversed(self.added):
            self.gm.graph.erase_node(node)
        self.gm.recompile()

    def tied(self, compiled: Any) -> Callable[..., list[Any]]:
        """What the compiled graph, a function, computes, as the user expects it."""
        count = len(self.original[0])

        def run(*args: Any) -> list[Any]:
            returned = compiled(*args)
            outputs, added = list(returned[:count]), returned[count:]
            for i, key, number in zip(self.places, added[::2], added[1::2], strict=True):
                outputs[i] = tie(key, number, outputs[i]) if key.requires_grad else outputs[i]
            return outputs

        return run


def detach_large(gm: fx.GraphModule, settings: Settings, config: dict[str, Any]) -> Detached | None:
    """Lets Dynamo's graph return large outputs, of which a loss is computed, without a gradient, and a key for each.
    None if it has none, if nobody can decide at run time (CUDA graphs, C++), if what is compiled is written to a file
    (torch's aot_compile), for which it must be torch's own, or under a memory budget, by which a key may be computed
    again. In place."""
    recorded = config.get("triton.cudagraphs", inductor_config.triton.cudagraphs)
    cpp = config.get("cpp_wrapper", inductor_config.cpp_wrapper)
    packed = getattr(functorch_config, "bundled_autograd_cache", False)
    budget = functorch_config.activation_memory_budget < 1
    if recorded or cpp or packed or budget or not allowed(UNDEFINED, NAMES, settings):
        return None
    output = gm.graph.output_node()
    (values,) = output.args
    if not isinstance(values, tuple | list) or not torch.is_grad_enabled():
        return None
    places, changed, added, keys = _large(gm.graph, values), list(values), list[fx.Node](), list[fx.Node]()
    if not places:
        return None
    with gm.graph.inserting_before(output):
        for i in places:
            value = values[i]
            assert isinstance(value, fx.Node)
            example = value.meta["example_value"]
            changed[i] = alone = gm.graph.call_method("detach", (value,))
            alone.meta["example_value"] = example.detach()
            both = gm.graph.call_function(GRADIENT_KEY, (value,))
            examples = GRADIENT_KEY(example.detach())  # (hooks would see what else it keeps)
            parts = [gm.graph.call_function(operator.getitem, (both, n)) for n in range(2)]
            for node, made in ((both, examples), *zip(parts, examples, strict=True)):
                node.meta["example_value"] = made
            keys += parts
            added += [alone, both, *parts]
    original, output.args = output.args, ((*changed, *keys),)
    gm.recompile()
    return Detached(gm, places, original, added)


def _large(graph: fx.Graph, outputs: Sequence[Any]) -> list[int]:
    """The places of large outputs that have a gradient, share memory with nothing that comes in or goes out, and of
    which a loss is computed: an output that is one number with a gradient. (A layer's output beside a loss that is not
    made of it, as of its router, gets a gradient from the next layer.)"""
    values = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in outputs]
    pairs = [(n, t) for n, t in zip(outputs, values, strict=True) if isinstance(t, Tensor)]
    made_of = g.reached((n for n, t in pairs if t.dim() == 0 and t.requires_grad), lambda n: n.all_input_nodes)
    tensors = [t for _, t in pairs]
    inputs = (n.meta.get("example_value") for n in graph.find_nodes(op="placeholder"))
    everyone = [*tensors, *(t for t in inputs if isinstance(t, Tensor))]
    if any(map(is_traceable_wrapper_subclass, everyone)):
        return []
    shared = Counter(StorageWeakRef(t.untyped_storage()) for t in everyone)
    return [
        i
        for i, t in enumerate(values)
        if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point() and t.dim() > 0 and outputs[i] in made_of
        if shared[StorageWeakRef(t.untyped_storage())] == 1
        if t.itemsize * torch.Size(map(assumed, t.shape)).numel() >= LARGE
    ]


def add_where_read(graph: fx.Graph) -> None:
    """What a gradient that is handed in is added to takes it in its own memory. In place, in a joint graph."""
    for node in graph.find_nodes(op="call_function", target=GRADIENT_OF):
        if len(node.users) != 1:
            continue
        (total,) = node.users
        others = [a for a in total.all_input_nodes if a is not node]
        if total.target is not g.aten.add.Tensor or total.kwargs or len(others) != 1:
            continue
        times, number, *_ = node.args
        with graph.inserting_before(total):
            added = graph.call_function(ADD_GRADIENT_OF, (*others, times, number))
        added.meta = dict(total.meta)
        total.replace_all_uses_with(added)
        graph.erase_node(total)
        graph.erase_node(node)
