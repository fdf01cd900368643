"""The graphs that Inductor would compile, without a GPU, without memory for the model, and without running it.

`load` builds the user's model on memory that is reserved and never touched; `capture` sends it through Dynamo and
AOTAutograd as compile_fx does and hands over what a `joint_custom_pre_pass` sees. In the place of compiled code stands
a stub that returns tensors of the right shape, so what follows a graph break is captured too.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.partitioners import default_partition
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.joint_graph import canonicalize_aten_ir_passes
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.core.versions import check_torch
from coda_inductor.explain.autocast import autocast_like_cuda
from coda_inductor.explain.like_cuda import like_cuda
from coda_inductor.inductor.tracing import functorch_options, passes
from coda_inductor.inductor.undefined import detach_large
from coda_inductor.patterns.graph import copied
from coda_inductor.patterns.sizes import assumed

NO_GRAPH = "torch.compile captures no graph of this model: all of it runs eagerly"
WHERE = "TORCH_LOGS=graph_breaks says where it gives up"
LARGE = 1 << 20
"""Elements from which on a tensor's values are neither computed nor stored."""


def capture(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Literal["infer", "train"],
    on_graph: Callable[[fx.Graph], None],
    settings: Settings | None = None,
) -> None:
    """Calls `on_graph` with a copy of each functional, decomposed ATen graph of model(*args, **kwargs).

    "train" gives joint graphs, forward and backward in one; "infer" runs in eval mode under no_grad. What Dynamo leaves
    to eager between two graphs is executed, on uninitialised values. meta["name"] of a placeholder is the user's name.
    Raises Unsupported with a torch that was not tested, with which nothing is compiled our way, and of a model of which
    torch.compile captures no graph.
    """
    check_torch()
    names: list[str] = []
    captured: list[str] = []

    def hand_over(gm: fx.GraphModule, *_: Any, **__: Any) -> fx.GraphModule:
        canonicalize_aten_ir_passes(gm)
        for theirs in passes(inductor_config.joint_custom_pre_pass):
            theirs(gm.graph)
        graph = fx.GraphModule(gm, copied(gm.graph)).graph
        for node in graph.find_nodes(op="placeholder"):
            place = getattr(node.meta.get("desc"), "idx", None)
            node.meta["name"] = names[place] if isinstance(place, int) and place < len(names) else str(node.target)
        captured.append(mode)
        on_graph(graph)
        return gm

    def split(gm: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> Any:
        return default_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        names[:] = [user_name(n) for n in gm.graph.find_nodes(op="placeholder")]
        chosen = settings or Settings()
        told, detached = functorch_options(gm, chosen), detach_large(gm, chosen, {})
        with functorch_config.patch(**told):
            found = compile_fx.compile_fx(gm, inputs, inner_compile=stub)
        return detached.tied(found) if detached else found

    train = mode == "train"
    was_training = isinstance(model, torch.nn.Module) and model.training
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(like_cuda())
        stack.enter_context(autocast_like_cuda())
        stack.enter_context(mock.patch.object(compile_fx, "joint_graph_passes", hand_over))
        stack.enter_context(mock.patch.object(compile_fx, "min_cut_rematerialization_partition", split))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(torch.set_grad_enabled(train))
        if isinstance(model, torch.nn.Module):
            model.train(train)
            stack.callback(model.train, was_training)
        stack.callback(torch._dynamo.reset)
        torch.compile(model, backend=backend)(*args, **kwargs)
    if not captured:
        raise Unsupported(NO_GRAPH, hint=WHERE)


def user_name(node: fx.Node) -> str:
    """What the user calls an input of Dynamo's graph: layers.0.weight for a parameter, else the argument's name."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name() if callable(name) else str(name))
    path = re.sub(r"^[LG]\['([^']*)'\]", r"\1", path)
    return path.removeprefix("self.").removeprefix("fn.") or str(node.target)  # "fn": torch.compile wraps a container


def stub(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    """Stands for the code of `gm`: its outputs, shaped for the sizes it was traced at, large ones never written."""
    (outputs,) = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args
    values = [out.meta["val"] if isinstance(out, fx.Node) else out for out in outputs]

    def compiled(*_: Any) -> list[Any]:
        return [_empty(v) if isinstance(v, Tensor) else v if v is None else assumed(v) for v in values]

    return compiled


def _empty(like: Tensor) -> Tensor:
    """A CPU tensor of the shape, strides and dtype of `like`: zeros if small, memory without pages if large."""
    out = torch.empty_strided([assumed(s) for s in like.shape], [assumed(s) for s in like.stride()], dtype=like.dtype)
    return out if out.numel() >= LARGE else out.zero_()


def load(spec: str, *, valued: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from the FUNCTION that "MODULE:FUNCTION" names; the working directory is importable.
    `valued`: with all its values, from one seed, where FUNCTION puts it (on the CPU where torch sees no GPU)."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise Unsupported(f"{spec!r} names no function", hint="write MODULE:FUNCTION, as in my_model:build")
    if module.endswith(".py") or "/" in module or module.startswith("."):
        plain = module.removesuffix(".py").strip("./").replace("/", ".")
        drop = "drop the .py: " if module.endswith(".py") else "write "
        raise Unsupported(f"{module!r} is a file, not a module", hint=f"{drop}{plain}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise Unsupported(f"module {module!r} has no function {name!r}", where=spec)
    fits(function, (), {}, f"{spec} takes arguments", "name a function that takes none")
    if valued:
        torch.manual_seed(0)
    with ExitStack() as stack:
        if not (valued and torch.cuda.is_available()):
            stack.enter_context(OnCpu())
        if not valued:
            stack.enter_context(Untouched())  # type: ignore[no-untyped-call]
        made = function()
    if isinstance(made, tuple) and len(made) > 1 and isinstance(made[1], Tensor):
        raise Unsupported(f"{spec} returned a tensor where a tuple is wanted", hint="return (model, (tensor,))")
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[1], (tuple, list)):
        hint = "return (model, args) or (model, args, kwargs)"
        raise Unsupported(f"{spec} returned {type(made).__name__}", hint=hint)
    model, args, kwargs = made[0], tuple(made[1]), dict(made[2]) if len(made) == 3 else {}
    called = model.forward if isinstance(model, torch.nn.Module) else model
    fits(
        called, args, kwargs, f"the arguments that {spec} returned do not fit its model", "compare them with forward's"
    )
    if valued:
        return model, args, kwargs
    if isinstance(model, torch.nn.Module):
        without_meta(model)
    return model, *tree_map_only(Tensor, lambda t: _empty(t) if t.is_meta else t, (args, kwargs))


def fits(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str, hint: str) -> None:
    """Raises Unsupported if the function cannot be called so. One whose parameters Python does not know is taken to."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Unsupported(f"{what}: {error}", hint=hint) from None


def without_meta(model: torch.nn.Module) -> None:
    """Gives memory that nobody touches to what is on the meta device still: made before `load`, as at import. What
    was one tensor stays one."""
    given: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, t in held.items():
                if t is not None and t.is_meta:
                    if t not in given:
                        plain = _empty(t)
                        wants = t.requires_grad
                        given[t] = torch.nn.Parameter(plain, wants) if isinstance(t, torch.nn.Parameter) else plain
                    held[name] = given[t]  # type: ignore[assignment]


class OnCpu(TorchFunctionMode):
    """Whatever asks for CUDA, or for no memory at all, gets the CPU: the user's function need not know that there is no
    GPU, and no memory for the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(_on_cpu, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


ELSEWHERE = ("cuda", "meta")


def _on_cpu(x: Any) -> Any:
    if isinstance(x, str) and x.partition(":")[0] in ELSEWHERE:
        return "cpu"
    return torch.device("cpu") if isinstance(x, torch.device) and x.type in ELSEWHERE else x


class Untouched(TorchDispatchMode):
    """Tensors of LARGE elements and more have a shape, but no operation writes or reads them.

    The system hands out pages when they are touched, so a model of any size is built in the memory of its small
    tensors, whose values are right.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or not _is_large((args, kwargs), func, args, kwargs):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        return tree_map_only(Tensor, _empty, _on_meta(func, args, kwargs))


def _is_large(inputs: Any, func: Any, args: Any, kwargs: Any) -> bool:
    """Does `func` take a large tensor, or make one out of numbers?"""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    if tensors:
        return any(t.numel() >= LARGE for t in tensors)
    made: Iterable[Any] = tree_leaves(_on_meta(func, args, kwargs))
    return any(isinstance(t, Tensor) and math.prod(t.shape) >= LARGE for t in made)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of `func` without its values."""
    with torch._C.DisableTorchFunction():  # OnCpu knows no meta
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        if any(a.name == "device" for a in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory" and k != "generator"})
