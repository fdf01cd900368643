"""Two ranks train the demo's Llama with the wrappers that people use: the wrappers, and what one rank does."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from coda_inductor.core.versions import numbers
from coda_inductor.demo import LENGTH, VOCABULARY, Llama

RANKS, BATCH = 2, 2
EXACT = 1e-10
PATIENCE = timedelta(seconds=60)


def data_parallel(model: Any, backend: str = "coda") -> Any:
    """Four buckets, which Dynamo compiles one by one."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 10  # type: ignore[attr-defined]
    wide = next(model.parameters()).element_size()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2 * wide)
    return torch.compile(wrapped, backend=backend)


def fully_sharded(model: Any, backend: str = "coda") -> Any:
    """FSDP2, each block compiled by itself."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        layer.compile(backend=backend)
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model: Any, backend: str = "coda", sequence: bool = False) -> Any:
    """Heads and features divided among the ranks; with `sequence`, the tokens too between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, tokens = init_device_mesh(next(model.parameters()).device.type, (RANKS,)), Shard(1)
    wide = ["attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in wide}
    narrow: dict[str, Any] = {"output_layouts": tokens} if sequence else {}
    plan |= {name: RowwiseParallel(**narrow) for name in ("attention.o", "feed_forward.down")}
    if sequence:
        for name, tables in {"attention": (None, None), "feed_forward": ()}.items():
            before, within = (tokens, *tables), (Replicate(), *tables)
            plan[name] = PrepareModuleInput(input_layouts=before, desired_input_layouts=within)
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feed_forward_norm")}
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        head = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
        parallelize_module(model, mesh, {"embed": rows, "norm": SequenceParallel(), "head": head})
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return torch.compile(model, backend=backend)


KINDS: dict[str, tuple[Callable[..., Any], bool, list[int]]] = {
    # how; do all ranks see the same batch; the Regions of a rank's graphs
    "DDP": (data_parallel, False, [6, 9, 4, 0]),
    "FSDP2": (fully_sharded, False, [8]),
    "TP": (tensor_parallel, True, [9]),
    "TP and sequence parallel": (partial(tensor_parallel, sequence=True), True, [14]),
}


@contextlib.contextmanager
def a_rank(rank: int, place: str, backend: str = "gloo") -> Iterator[None]:
    dist.init_process_group(backend, rank=rank, world_size=RANKS, init_method=f"file://{place}", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(rank: int, kind: str) -> dict[str, Any]:
    """One step: the largest relative error of the loss's and parameters' gradients, and the Regions."""
    from coda_inductor.inductor.joint_pass import REPORTS

    make, same, _ = KINDS[kind]
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(0)
    eager = Llama().double()
    model = copy.deepcopy(eager)
    ids, labels = torch.randint(VOCABULARY, (2, RANKS * BATCH, LENGTH))
    whole = F.cross_entropy(eager(ids).flatten(0, 1), labels.flatten())
    whole.backward()
    mine = slice(None) if same else slice(rank * BATCH, (rank + 1) * BATCH)
    wrapped = make(model)  # whose hooks see the backward
    loss = F.cross_entropy(wrapped(ids[mine]).flatten(0, 1), labels[mine].flatten())
    loss.backward()
    if not same:
        dist.all_reduce(loss.data)
        loss.data /= RANKS
    pairs: list[tuple[Any, Any]] = [(loss.detach(), whole.detach())]
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        grad: Any = ours.grad
        pairs.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad, theirs.grad))
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return {"error": max(errors), "regions": [len(report.sites) for report in REPORTS]}


def main(rank: int, place: str, *kinds: str) -> None:
    """Prints a line for each of these kinds. Garbage is collected at the worst of times, while a bucket is compiled:
    see test_frames. (Stock Inductor of torch 2.15 does not survive that itself: a bucket runs on tensors without
    data. The collector is not switched off there.)"""
    import torch._functorch.config
    import torch._inductor.config
    from quick import quick

    from coda_inductor.inductor import joint_pass

    def rewritten(*args: Any) -> Any:
        gc.collect()
        return rewrite(*args)

    quick()
    torch.set_num_threads(1)
    rewrite: Callable[..., Any] = vars(joint_pass)["rewrite"]
    if (2, 11) < numbers(torch.__version__)[:2] < (2, 14):
        gc.disable()
        vars(joint_pass)["rewrite"] = rewritten
    off = torch._functorch.config.patch(enable_autograd_cache=False)
    with a_rank(rank, place), torch._inductor.config.patch(fx_graph_cache=False), off:
        for kind in kinds:
            print(json.dumps({"kind": kind, **train(rank, kind)}), flush=True)
