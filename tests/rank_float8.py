"""Two ranks train blocks in FP8 by torchao under FSDP2, each block compiled by itself: what one rank does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from float8_layers import WIDTH, Mlp
from rank_training import RANKS, a_rank
from torch import nn

from coda_inductor.inductor.joint_pass import REPORTS

BLOCKS, STEPS = 2, 3
CASES = {
    # by recipe; are weights cast before they are gathered
    "tensorwise": ("tensorwise", False),
    "tensorwise, gathered in FP8": ("tensorwise", True),
    "rowwise": ("rowwise", False),
    "rowwise_with_gw_hp": ("rowwise_with_gw_hp", False),
}


def losses(rank: int, recipe: str, gathered: bool, backend: str) -> Iterator[float]:
    """Of a few steps with SGD, in bfloat16, the parameters in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(nn.Linear) for _ in range(BLOCKS)))
    config = Float8LinearConfig.from_recipe_name(recipe)
    if gathered:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    whole: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        loss = whole(torch.randn(2, 56, WIDTH).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gathered:
            precompute_float8_dynamic_scale_for_fsdp(whole)
        yield loss.item()


def main(rank: int, place: str) -> None:
    """Prints a line for each case: the losses by both backends, and the Regions of ours."""
    from quick import quick

    quick()
    torch.set_num_threads(1)
    with a_rank(rank, place), torch._inductor.config.patch(fx_graph_cache=False):
        for case, (recipe, gathered) in CASES.items():
            found = {}
            for backend in ("inductor", "coda"):
                torch._dynamo.reset()
                REPORTS.clear()
                found[backend] = [*losses(rank, recipe, gathered, backend)]
            print(json.dumps({"case": case, **found, "regions": [len(r.sites) for r in REPORTS]}), flush=True)
