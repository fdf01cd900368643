"""Training on two GPUs of one host: backend="coda" against torch.compile's default under the wrappers that people use.

    python bench/distributed.py [ddp|fsdp2|tp ...] [--out FILE]

Two layers of transformers' Llama at 1B widths with head and loss, 8192 tokens a rank: DistributedDataParallel (Dynamo
cuts the model at its buckets), FSDP2 with each layer compiled by itself, or tensor parallel (8192 tokens in all). A
JSON line for each: the medians of rank 0's steps, forward and backward with their collectives, in one rotation;
"sites" are the Regions of the graphs, "launches" the kernels of a step of rank 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import layers
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from training import llama

from coda_inductor.codegen import target
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

RANKS, TOKENS, LENGTH = 2, 8192, 1024
BACKENDS = ("inductor", "coda")


def wrapped(kind: str, model: Any, backend: str) -> Any:
    """The model on all ranks, compiled as `kind` is compiled."""
    if kind == "ddp":
        return torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            layer.compile(backend=backend)
            fully_shard(layer)
        return fully_shard(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(model.device.type, (RANKS,))
    wide = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in wide}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return torch.compile(model, backend=backend)


def steps(kind: str, rank: int) -> dict[str, Any]:
    """The row of one kind, as this rank sees it."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = llama(2048, 8192, 32, 2, 128256).to(torch.bfloat16)
    torch.manual_seed(0 if kind == "tp" else rank)
    batch = TOKENS // LENGTH
    inputs = [torch.randint(0, 128256, (2, batch, LENGTH), device="cuda") for _ in range(layers.SETS)]
    calls, models, seconds, launches = [], [], [], 0
    for backend in BACKENDS:
        torch._dynamo.reset()
        REPORTS.clear()
        start = time.perf_counter()
        model = copy.deepcopy(plain)
        f = wrapped(kind, model, backend)

        def call(s: int, f: Any = f, model: Any = model) -> object:
            model.zero_grad(set_to_none=True)
            loss = f(input_ids=inputs[s][0], labels=inputs[s][1]).loss
            loss.backward()
            return loss.detach()

        calls.append(call)
        models.append(model)
        for _ in range(2):
            launch.LAUNCHES.clear()
            call(0)
        launches = sum(launch.LAUNCHES.values())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    apart = max(_apart(a.grad, b.grad) for b, a in zip(*(m.parameters() for m in models), strict=True))
    baseline, ms = layers.rotation(calls)
    return {
        "case": f"{kind}-llama-1b", "ranks": RANKS, "mode": "train", "baseline": "torch.compile default", "ms": ms,
        "baseline_ms": baseline, "speedup": baseline / ms, "difference": apart,
        "sites": [len(report.sites) for report in REPORTS], "launches": launches,
        "fallbacks": sum(launch.FALLBACKS.values()), "compile_s": dict(zip(BACKENDS, seconds, strict=True)),
        "machine": f"{RANKS} x {torch.cuda.get_device_name()}",
        "versions": {**target.versions(), "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def _apart(ours: Any, theirs: Any) -> float:
    """The relative difference (Frobenius) of two gradients."""
    a, b = (g.full_tensor() if hasattr(g, "full_tensor") else g for g in (ours, theirs))
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def work(rank: int, kinds: list[str], place: str, out: str, command: list[str]) -> None:
    """A rank's process: rank 0 writes and prints."""
    sys.argv = command
    warnings.filterwarnings("ignore", category=FutureWarning)
    inductor_config.fx_graph_cache = functorch_config.enable_autograd_cache = False  # a cached graph has no report
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS, init_method=f"file://{place}")
    for kind in kinds:
        row = steps(kind, rank)
        if rank == 0:
            with Path(out).open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({k: row[k] for k in ("case", "ms", "baseline_ms", "speedup", "sites", "difference", "compile_s")})
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["ddp", "fsdp2", "tp"])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "distributed.jsonl"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "store")
        processes.spawn(work, (args.kinds, place, args.out, sys.argv), nprocs=RANKS)


if __name__ == "__main__":
    main()
