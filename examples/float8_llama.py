"""Trains a small Llama in FP8 on the source of Python's standard library, byte by byte, with both backends.

    python examples/float8_llama.py                                 # rowwise, on a GPU: coda, then inductor
    python examples/float8_llama.py --recipe tensorwise --steps 100 --layers 16 --width 2048
    python examples/float8_llama.py --recipe bf16 --device cpu --target reference --steps 2 --width 64 --layers 1

Needs torchao, but for bf16. Parameters are in float32, products in FP8 by autocast and torchao's recipe; the head stays
in bfloat16. Prints for each backend the loss, tokens per second (the median step, the first ten left out) and the peak
of memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD, BYTES = 64, 256


class Layer(nn.Module):
    """Attention with rotary embeddings, then SwiGLU, each behind an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = self.first(x)
        q, k, v = (w(n).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        n = self.second(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, tokens, head] with the two halves of each head turned by its position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Model(nn.Module):
    """Bytes [batch, tokens] -> the logits of the next ones."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def corpus(megabytes: int = 8) -> Tensor:
    """Bytes of the standard library's modules."""
    found, size = list[bytes](), 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size > megabytes << 20:
            break
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)


def made(chosen: argparse.Namespace) -> nn.Module:
    """The model, its linear layers but the head by the recipe."""
    torch.manual_seed(chosen.seed)
    model = Model(chosen.width, chosen.layers, chosen.length).to(chosen.device)
    if chosen.recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(chosen.recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
    return model


def train(backend: str, chosen: argparse.Namespace) -> dict[str, float]:
    """A training run: the mean loss of the first and of the last steps, tokens per second, and the peak in GiB."""
    torch._dynamo.reset()
    model, data, cuda = made(chosen), corpus(), chosen.device == "cuda"
    options: dict[str, Any] = {"options": {"target": chosen.target}} if backend == "coda" and chosen.target else {}
    compiled: Any = torch.compile(model, backend=backend, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate, weight_decay=0.1, fused=cuda)
    generator = torch.Generator().manual_seed(chosen.seed)
    losses, seconds = list[float](), list[float]()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(chosen.steps):
        start = time.perf_counter()
        at = torch.randint(len(data) - chosen.length - 1, (chosen.batch, 1), generator=generator)
        window = data[at + torch.arange(chosen.length + 1)].long().to(chosen.device)
        for group in optimizer.param_groups:
            group["lr"] = chosen.rate * min(1.0, (step + 1) / 20)
        with torch.autocast(chosen.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(window[:, :-1]).flatten(0, 1).float(), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    few = max(1, min(50, chosen.steps // 4))
    return {
        "first": statistics.fmean(losses[:1]),
        "last": statistics.fmean(losses[-few:]),
        "tokens_s": chosen.batch * chosen.length / statistics.median(seconds[10:] or seconds),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan,
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains with each backend and prints a line for each; returns what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", help="bf16, rowwise, tensorwise or rowwise_with_gw_hp")
    parser.add_argument("--backends", nargs="+", default=["coda", "inductor"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="", help="of coda; reference runs anywhere")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    for name, default in {"steps": 300, "width": 1024, "layers": 8, "batch": 16, "length": 1024, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(arguments)
    found = {}
    for backend in chosen.backends:
        said = found[backend] = train(backend, chosen)
        loss = f"loss {said['first']:.3f} -> {said['last']:.3f}"
        print(f"{backend:10} {loss}   {said['tokens_s']:10,.0f} tokens/s   peak {said['gib']:.2f} GiB", flush=True)
    return found


if __name__ == "__main__":
    main()
