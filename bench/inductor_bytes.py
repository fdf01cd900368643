"""Two accounts of the same bytes: coda_inductor.schedule.model's model, and Inductor's own schedule for an H200.

Inductor lowers and schedules the post-grad graph on fake CUDA tensors; no code is generated and no GPU is needed.

    python bench/inductor_bytes.py                     # Llama-3-8B, GPT-2 and a norm between products, both modes
    python bench/inductor_bytes.py llama3-8b --mode infer --kernels

Fails if the two differ by 10 % or more.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from coda_inductor.explain.capture import OnCpu, Untouched, capture, stub
from coda_inductor.explain.like_cuda import like_cuda
from coda_inductor.schedule.model import Kernel, kernels

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, gcnArchName="", L2_cache_size=50 << 20,
)  # fmt: skip

Mode = Literal["infer", "train"]
Row = dict[str, Any]
Build = Callable[[int], tuple[torch.nn.Module, tuple[torch.Tensor]]]


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Answers what Inductor asks about the device while it lowers and schedules."""
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_properties", lambda *_: H200),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: H200)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H200)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (scheduler, "has_triton", lambda *_: True),
        (fake_tensor, "init_gpu_context", lambda _: None),  # torch 2.11 starts CUDA for the first fake tensor
        # Only shapes are asked of these, and a CPU build's bindings refuse fake CUDA tensors.
        (torch.Tensor, "__invert__", lambda x: torch.bitwise_not(x)),
        (reinplace, "_inplace_generalized_scatter", lambda tensor, *_: tensor),
    ]
    DeviceProperties.create.cache_clear()
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, compile_threads=1))
        yield
    DeviceProperties.create.cache_clear()


def on_cuda(gm: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """Moves the graph to fake CUDA tensors in place; returns its inputs.

    Shapes are propagated on fake CPU tensors, whose device is then renamed: some bindings of a CPU build refuse CUDA.
    """
    inputs: list[Any] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                with mode:
                    val = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
            inputs.append(val)
    compile_fx.fake_tensor_prop(gm, inputs, force_allow_non_fake_inputs=True)
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        for val in tree_leaves(node.meta.get("val")):
            if isinstance(val, FakeTensor):
                val.fake_device = torch.device("cuda", 0)
    return [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]


def inductor_kernels(gm: fx.GraphModule, is_inference: bool) -> list[Row]:
    """Inductor's own memory-bound kernels for a graph as inner_compile receives it."""
    fake = next(n.meta["val"].fake_mode for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    with h200(), torch.no_grad(), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
        compile_fx.view_to_reshape(gm)
        inputs = on_cuda(gm, fake)
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        graph = GraphLowering(gm, example_inputs=inputs, shape_env=fake.shape_env, is_inference=is_inference)
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            return [row for node in graph.scheduler.nodes if (row := measure(node)) is not None]


def measure(node: Any) -> Row | None:
    """Bytes that one scheduled kernel reads and writes, each buffer once; None for extern and empty kernels."""
    if isinstance(node, (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)):
        return None
    inside = set(node.get_nodes())
    mutated = {name for buffer in node.get_outputs() for name in buffer.get_mutations()}
    touched: dict[str, dict[str, int]] = {"reads": defaultdict(int), "writes": defaultdict(int)}
    for kind, deps in (("reads", node.read_writes.reads), ("writes", node.read_writes.writes)):
        for dep in deps:
            buffer = V.graph.scheduler.name_to_buf.get(dep.name)
            if kind == "reads" and dep.name in mutated and not isinstance(dep, MemoryDep):
                continue  # an order between kernels, not a read
            produced = dep.name in node.get_buffer_names()
            if produced and (kind == "reads" or all(u.node in inside for u in buffer.users)):  # type: ignore[union-attr]
                continue
            touched[kind][dep.name] += elements(dep)
    sizes = {
        kind: {b: min(n, hint(V.graph.get_numel(b))) * V.graph.get_dtype(b).itemsize for b, n in buffers.items()}
        for kind, buffers in touched.items()
    }
    origins = sorted({o.name for snode in node.get_nodes() for o in getattr(snode.node, "origins", ())})
    return {
        "bytes": int(sum(sizes["reads"].values()) + sum(sizes["writes"].values())),
        "reads": {k: int(v) for k, v in sizes["reads"].items()},
        "writes": {k: int(v) for k, v in sizes["writes"].items()},
        "origins": origins,
    }


def hint(size: Any) -> int:
    """The extent of a symbolic size at the traced sizes; torch 2.13 renamed the question."""
    sizes = V.graph.sizevars
    return int(sizes.optimization_hint(size) if hasattr(sizes, "optimization_hint") else sizes.size_hint(size))


def elements(dep: Any) -> int:
    """How many elements the access `dep` touches: the ranges of the loops in its index; for a gather, of all."""
    if not isinstance(dep, MemoryDep):
        return hint(dep.get_numel())
    count = 1
    for var, size in zip(dep.var_names, dep.size, strict=True):
        if dep.is_indirect() or var in dep.index.free_symbols:
            count *= hint(size)
    return count


def own_schedule(model: Callable[..., Any], args: Sequence[Any], mode: Mode) -> list[Row]:
    """Inductor's kernels for all graphs of model(*args), forward and backward."""
    rows: list[Row] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        rows.extend(inductor_kernels(fx.GraphModule(gm, copy.deepcopy(gm.graph)), bool(kwargs.get("is_inference"))))
        return stub(gm, inputs)

    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(like_cuda())
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        stack.enter_context(
            functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=mode == "train")
        )
        stack.enter_context(torch.set_grad_enabled(mode == "train"))
        if isinstance(model, torch.nn.Module):
            model.train(mode == "train")
        torch.compile(model, backend=functools.partial(compile_fx.compile_fx, inner_compile=inner))(*args)
    torch._dynamo.reset()
    return rows


def modelled(model: Callable[..., Any], args: Sequence[Any], mode: Mode) -> list[Kernel]:
    """The byte model's kernels for the same."""
    found: list[Kernel] = []
    capture(model, args, {}, mode, lambda graph: found.extend(kernels(graph)))
    return found


def without_mask(config: Any) -> Any:
    """Transformers builds a [B, 1, S, S] mask when traced; the known measurement ran causal attention without one."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    config._attn_implementation = "causal"
    return config


def llama3_8b(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(without_mask(config)).to(torch.bfloat16)
    return model, (torch.zeros(2, 4096, dtype=torch.long),)


def gpt2(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(without_mask(GPT2Config(n_layer=layers, use_cache=False))).to(torch.bfloat16)
    return model, (torch.zeros(8, 1024, dtype=torch.long),)


def rms(tokens: int) -> Build:
    """A norm between two products of width 4096."""

    def made(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
        first, second = (torch.nn.Linear(4096, 4096, bias=False) for _ in range(2))
        model = torch.nn.Sequential(first, torch.nn.RMSNorm(4096), second).to(torch.bfloat16)
        return model, (torch.zeros(tokens, 4096, dtype=torch.bfloat16),)

    return made


MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {  # layers: the last are extrapolated
    "llama3-8b": (llama3_8b, (2, 4, 32)),
    "gpt2": (gpt2, (2, 4, 12)),
    "rms-4096": (rms(4096), (1,)),
    "rms-16384": (rms(16384), (1,)),
}


def build(name: str, layers: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """The model at its real widths, without memory for it."""
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        return MODELS[name][0](layers)


def compared(name: str, mode: Mode, layers: int, verbose: bool = False) -> tuple[int, int]:
    """Bytes of Inductor's own schedule and of the model; prints every kernel of both if `verbose`."""
    own, ours = own_schedule(*build(name, layers), mode), modelled(*build(name, layers), mode)
    if verbose:
        for row in own:
            print(f"  own   {row['bytes'] / 1e6:10.3f} MB  {' '.join(row['origins'])}")
        for k in ours:
            print(f"  model {k.bytes / 1e6:10.3f} MB  {' '.join(n.name for n in k.nodes)}")
    return sum(r["bytes"] for r in own), sum(k.bytes for k in ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=" or ".join(MODELS))
    parser.add_argument("--mode", choices=("infer", "train"), action="append")
    parser.add_argument("--kernels", action="store_true", help="print every kernel of both, at the fewest layers")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, GB of memory-bound kernels: Inductor's own schedule, the model, model/own")
    apart = 0
    for name in options.models:
        first, *more = MODELS[name][1]
        for mode in options.mode or ("infer", "train"):
            totals = {first: compared(name, mode, first, options.kernels)}
            if more:
                second, depth = more
                totals[second] = compared(name, mode, second)
                pairs, steps = zip(*totals.values(), strict=True), (depth - first) // (second - first)
                few, many = (few + (many - few) * steps for few, many in pairs)
                totals[depth] = few, many
            for layers, (own, ours) in totals.items():
                print(f"{name:10} {mode:6} {layers:3} layers {own / 1e9:9.3f} {ours / 1e9:9.3f} {ours / own:7.3f}")
                apart += abs(ours / own - 1) >= 0.10
    return min(apart, 1)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    sys.exit(main())
