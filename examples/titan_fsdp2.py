"""Trains a Llama as TorchTitan does, by both backends side by side: each block compiled by itself, then FSDP2 around
it, float32 weights that are gathered in bfloat16, the loss compiled by itself.

    torchrun --nproc-per-node 2 examples/titan_fsdp2.py          # one process for each GPU
    torchrun --nproc-per-node 2 examples/titan_fsdp2.py --small  # two ranks on a CPU
    python examples/titan_fsdp2.py                               # one rank
"""

from __future__ import annotations

import os
from typing import Any

import side_by_side
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIZES = {
    "width": (2048, 64), "inner": (8192, 128), "layers": (8, 2), "heads": (32, 4), "kv": (8, 2),
    "vocabulary": (128256, 256), "batch": (4, 2), "length": (2048, 128),
}  # fmt: skip


class Block(nn.Module):
    """Grouped-query attention with rotary embeddings as complex products, then SwiGLU."""

    def __init__(self, width: int, inner: int, heads: int, kv: int) -> None:
        super().__init__()
        self.head = width // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv * self.head, bias=False) for _ in range(2))
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        n = self.attention_norm(x)
        q, k, v = (w(n).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, turns), rotated(k, turns), v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = x + self.wo(a.transpose(1, 2).flatten(2))
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))  # type: ignore[no-any-return]


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """x [batch, tokens, heads, head], its neighbouring features turned as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)


class Transformer(nn.Module):
    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(chosen.vocabulary, chosen.width)
        shape = chosen.width, chosen.inner, chosen.heads, chosen.kv
        self.layers = nn.ModuleList(Block(*shape) for _ in range(chosen.layers))
        self.norm, self.output = nn.RMSNorm(chosen.width), nn.Linear(chosen.width, chosen.vocabulary, bias=False)
        half = torch.arange(0, chosen.width // chosen.heads, 2) * chosen.heads / chosen.width
        angles = torch.outer(torch.arange(chosen.length), 500000.0**-half)
        self.turns = nn.Buffer(torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)
    by_torchrun = "RANK" in os.environ
    store = dist.HashStore()  # type: ignore[attr-defined]
    alone: dict[str, Any] = {} if by_torchrun else {"store": store, "rank": 0, "world_size": 1}
    if chosen.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo", **alone)
    mesh = init_device_mesh(chosen.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        with torch.device(chosen.device):
            model = Transformer(chosen)
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        text = side_by_side.batches(chosen.batch, chosen.length, chosen.device, seed=dist.get_rank())

        @torch.compile(backend=backend)
        def loss_of(scores: Tensor, following: Tensor) -> Tensor:
            return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())

        def step() -> Tensor:
            ids, following = next(text)
            loss: Tensor = loss_of(model(ids), following)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    tokens = chosen.batch * chosen.length * dist.get_world_size()
    case = f"Llama as TorchTitan compiles it, FSDP2, width {chosen.width}, {chosen.layers} layers, {tokens} tokens"
    row = side_by_side.compare(case, make, chosen, tokens)
    dist.destroy_process_group()
    return row


if __name__ == "__main__":
    main()
