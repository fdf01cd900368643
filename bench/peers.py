"""The same model by what else makes it faster: torch.compile's default, ours, Inductor's max-autotune, Liger's kernels
and torchao's FP8, in one process.

    python bench/peers.py CASE [SIDE ...] [--attention eager] [--seconds S] [--rounds R] [--out FILE]

A CASE is `llama-1b` (transformers, 16 layers, 4 x 2048 tokens, a step with AdamW), `llama-8b` (two layers of its
widths, 2 x 4096 tokens, forward and backward), `nano` (a GPT as nanochat trains it, a step), `dit` or `dit-infer` (two
blocks of DiT-XL), `sam` or `sam-infer` (a fourth of the image encoder of SAM ViT-H, of transformers: eight blocks, one
of which attends to the whole image; four images). With `--attention eager` transformers writes attention out, as two
products and a softmax. A SIDE is one of SIDES below; all that fit the case by default. "again" is torch.compile a
second time: differences below its distance from "inductor" say nothing.

One JSON line: for each side "ms", repeated alone for seconds, the median of rounds; "turns_ms" by turns; "gib", the
peak over what lies there; "compile_s", the first two calls; "result", the loss of the first call (or the mean square of
what it returns). A side whose result is another computes something else. A run that is ended early (SIGTERM) leaves a
row too, in which each side that was compiled has the "ms" of some seconds at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.measure import sides

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "transformers", "liger-kernel", "torchao")
SIDES = ("inductor", "coda", "max-autotune", "float8", "float8-coda", "again", "liger")
"""Liger changes transformers' classes, so that it must be the last of a process."""
CASES = ("llama-1b", "llama-8b", "nano", "dit", "dit-infer", "sam", "sam-infer")
LLAMA = ("liger", "float8", "float8-coda")  # sides for cases of transformers' Llama

Step = Callable[[], Tensor]


def unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class NanoBlock(nn.Module):
    """Norms without weight, rotary halves, norms of each head behind them, squared ReLU."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = unit(x)
        q, k, v = (w(n).unflatten(-1, (-1, 128)) for w in (self.q, self.k, self.v))
        q, k = (unit(rotated(t, cos, sin)).transpose(1, 2) for t in (q, k))
        a = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(unit(x))).square())


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, tokens, heads, head], whose halves are turned by tables [tokens, 1, head / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


class Nano(nn.Module):
    """Float32 weights but for the embedding, and scores that are capped. For autocast."""

    def __init__(self, layers: int, d: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(NanoBlock(d) for _ in range(layers))
        self.head = nn.Linear(d, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, 128, 2) / 128))[:, None]
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = unit(self.embed(ids))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        scores = 15 * torch.tanh(self.head(unit(x)).float() / 15)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def llama(layers: int, d: int, ff: int, heads: int, kv: int, tied: bool, attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=d, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=128256 if tied else 1024, tie_word_embeddings=tied, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-any-return]


def sam(attention: str) -> nn.Module:
    from transformers import SamVisionConfig, SamVisionModel

    config = SamVisionConfig(
        hidden_size=1280, num_hidden_layers=8, num_attention_heads=16, mlp_dim=5120, global_attn_indexes=[7],
        attn_implementation=attention, initializer_range=0.02,
    )  # fmt: skip
    model = SamVisionModel(config)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:  # which begin at 0
            nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16)


def changed(side: str, model: Any) -> str | None:
    """Does to a model what its side is, in place; the mode of torch.compile."""
    if side == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if side.startswith("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        inner = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(model, config=inner, module_filter_fn=lambda m, name: "lm_head" not in name)
    return "max-autotune-no-cudagraphs" if side == "max-autotune" else None


def step_of(case: str, side: str, attention: str) -> Step:
    """A step of a fresh model with the same weights for each side."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    with torch.device("cuda"):
        if case.startswith("llama"):
            whole = case == "llama-1b"
            sizes = (16, 2048, 8192, 32, 8, True) if whole else (2, 4096, 14336, 32, 8, False)
            model = llama(*sizes, attention)
            given: tuple[Tensor, ...] = (torch.randint(0, 1024, (4, 2048) if whole else (2, 4096)),)
        elif case == "nano":
            model, given = Nano(20, 1280, 65536, 2048), (*torch.randint(0, 65536, (2, 16, 2048)),)
        elif case.startswith("sam"):
            model, given = sam(attention), models.tiles((4, 3, 1024, 1024))
        else:
            make, inputs = models.MODELS["dit-xl"]
            model, given = make().to(torch.bfloat16), inputs()
    mode = changed(side, model)
    if case == "llama-8b":
        model = model.model  # no head
    compiled = torch.compile(model, backend="coda" if side.endswith("coda") else "inductor", mode=mode)
    fused = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) if case in ("llama-1b", "nano") else None

    def call() -> Tensor:
        if case == "llama-1b":
            return compiled(input_ids=given[0], labels=given[0]).loss  # type: ignore[no-any-return]
        if case == "nano":
            with torch.autocast("cuda", torch.bfloat16):
                return compiled(*given)  # type: ignore[no-any-return]
        return models.first(compiled(*given))

    def step() -> Tensor:
        made = call()
        (made.backward if made.dim() == 0 else lambda: made.backward(torch.ones_like(made)))()
        if fused is not None:
            fused.step()
        model.zero_grad(set_to_none=True)
        return made.detach()

    return torch.no_grad()(call) if case.endswith("-infer") else step


def measure(
    case: str, names: list[str], attention: str, seconds: float, rounds: int, found: dict[str, dict[str, Any]]
) -> None:
    """Adds what is found out of each side as soon as it is."""
    steps = dict[str, Step]()
    for name in names:
        start = time.perf_counter()
        step = step_of(case, name, attention)
        result = step()
        if result.dim():
            result = result.float().square().mean()
        value = float(result)
        step()
        torch.cuda.synchronize()
        side = {"compile_s": round(time.perf_counter() - start, 1), "result": value}
        start = time.perf_counter()
        side["gib"] = round(sides.peak_gib(step) or 0.0, 3)
        about_ms = 1e3 * (time.perf_counter() - start)
        found[name] = side | {"ms": round(sides.alone(step, about_ms, seconds, on_gpu=True), 3)}
        steps[name] = step
        gc.collect()
        print(name, found[name], flush=True)
    times = sides.compared([*steps.values()], seconds, rounds, lambda what: None)
    for name, side in zip(steps, times, strict=True):
        found[name] |= {"ms": round(side.alone, 3), "turns_ms": round(side.turns, 3)}


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("sides", nargs="*", metavar="SIDE", help=" or ".join(SIDES))
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of transformers' models")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    names = chosen.sides or [s for s in SIDES if s not in LLAMA or chosen.case.startswith("llama")]
    names.sort(key=SIDES.index)
    found = dict[str, dict[str, Any]]()
    row = {
        "case": chosen.case, "mode": "infer" if chosen.case.endswith("-infer") else "train",
        "attention": chosen.attention, "sides": found, "machine": torch.cuda.get_device_name(), "versions": versions(),
        "command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip

    def leave() -> None:
        print(json.dumps(row), flush=True)
        if chosen.out and found:
            with chosen.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def ended(*given: object) -> None:  # an exception would be caught by what tunes
        leave()
        os._exit(1)

    signal.signal(signal.SIGTERM, ended)
    try:
        measure(chosen.case, names, chosen.attention, chosen.seconds, chosen.rounds, found)
    finally:
        leave()


if __name__ == "__main__":
    main()
