"""./dev demo: a two-layer Llama-style model in plain PyTorch, what is derived from it, and how exactly it computes.

Needs no GPU: the derived program then runs on torch (CODA_INDUCTOR_TARGET=reference), rounding where kernels would.
On a Hopper GPU the generated kernels run, too.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.codegen.target import SM_90A, capability
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.report import plural
from coda_inductor.explain.steps import program
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

HIDDEN, FEED_FORWARD, HEADS, KEY_VALUE_HEADS, VOCABULARY, LAYERS = 512, 1408, 8, 4, 1024, 2
HEAD, BATCH, LENGTH = HIDDEN // HEADS, 2, 256


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k = nn.Linear(HIDDEN, KEY_VALUE_HEADS * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, KEY_VALUE_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KEY_VALUE_HEADS, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.feed_forward_norm, self.feed_forward = RMSNorm(), FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angle = torch.outer(torch.arange(LENGTH), 10000.0 ** -torch.linspace(0, 1, HEAD // 2 + 1)[:-1])
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def main() -> None:
    """Prints the three parts: what is derived, what it saves, how exact it is."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, ids = Llama().eval(), torch.randint(VOCABULARY, (BATCH, LENGTH))
    print(
        f"A Llama-style model in plain PyTorch: {LAYERS} layers, hidden size {HIDDEN}, feed-forward {FEED_FORWARD}, "
        f"{HEADS} heads ({KEY_VALUE_HEADS} for keys and values), {BATCH * LENGTH} tokens.\n"
    )
    derived(copy.deepcopy(model).bfloat16(), ids)
    exactness(model, ids)
    print(f"\n{time.perf_counter() - start:.0f} s")


def derived(model: nn.Module, ids: Tensor) -> None:
    """The Regions in words and formulas, and the bytes."""
    settings = Settings(target="reference")
    report = explain(model, (ids,), {}, "infer", settings)
    (listing,) = program(model, (ids,), {}, "infer", settings)["graphs"]
    steps = [s for s in listing["after"] if "region" in s]
    (graph,), t = report["graphs"], report["totals"]
    print(f"1. What is derived: {len(steps)} Regions, each one matrix product with what follows it as its epilogue.")
    print("   acc is the product's accumulator, s a sum over each row, y what leaves; N: kernel N of the program.")
    for step, region in zip(steps, graph["regions"], strict=True):
        laws = f"   by {', '.join(step['laws'])}" if step["laws"] else ""
        weights = ", ".join(dict.fromkeys(p["b"].partition(".weight.T")[0] for p in step["products"]))
        weights += " (halves of heads)" if len(step["products"]) > weights.count(",") + 1 else ""
        saved = f"{region['bytes_before'] / 1e6:.2f} -> {region['bytes_after'] / 1e6:.2f} MB"
        print(f"\n   {step['region']:<4}{weights}{laws}   {saved}")
        for s in step["stores"]:
            print(f"       {s['name']} = {s['formula']}")
        for s in step["sums"]:
            print(f"       {s['name']} = sum {s['formula']}")
    fired = Counter(law["law"] for law in listing["laws"])
    print("\n   Laws that fired: " + ", ".join(f"{name} {n} x" for name, n in fired.items()) + ". The first one:")
    print(f"       {listing['laws'][0]['before']}\n    =  {listing['laws'][0]['after']}\n")
    print("2. What it saves: bytes that memory-bound kernels move, as stock Inductor would launch them, and now.")
    print(
        f"   {t['bytes_before'] / 1e6:.1f} MB -> {t['bytes_after'] / 1e6:.1f} MB; {t['coverage']:.0%} of the former is"
    )
    print(
        f"   gone into epilogues; kernels beside products and attention: {t['kernels_before']} -> {t['kernels_after']}."
    )
    print("   What is left to Inductor, and the first condition that failed:")
    for (why, n), moved in _by_reason(graph["passes"]).items():
        print(f"       {plural(n, 'kernel')}, {moved / 1e6:.2f} MB: {why}")


def _by_reason(passes: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """(reason, how often) to bytes."""
    count, moved = Counter(p["why"] for p in passes), Counter[str]()
    for p in passes:
        moved[p["why"]] += p["bytes"]
    return {(why, count[why]): moved[why] for why in moved}


def exactness(model: nn.Module, ids: Tensor) -> None:
    """The error of the compiled model and of eager against float64, relative, in the Frobenius norm."""
    print("\n3. How exact it is: ||output - output in float64|| / ||output in float64||.")
    exact = copy.deepcopy(model).double()
    cases = [("float64, the program on torch", exact, "reference")]
    cases += [("bfloat16, the program on torch", copy.deepcopy(model).bfloat16(), "reference")]
    if capability() == SM_90A.capability:
        cases.append(("bfloat16, generated kernels", copy.deepcopy(model).bfloat16().cuda(), SM_90A.name))
    for name, made, target in cases:
        inputs = ids.to(next(made.parameters()).device)
        wanted_of = copy.deepcopy(made).double()
        torch._dynamo.reset()
        launch.LAUNCHES.clear()
        options: dict[str, Any] = {"target": target, "strict": True, "tune": "quick"}
        compiled = torch.compile(made, backend="coda", options=options)
        uncached = torch._inductor.config.patch(force_disable_caches=True)  # so that it compiles, whoever ran it before
        with torch.no_grad(), uncached, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager, ours, wanted = made(inputs).double(), compiled(inputs).double(), wanted_of(inputs)
        ran = sum(launch.LAUNCHES.values()) if target != "reference" else len(REPORTS[-1].sites)
        errors = [float((x - wanted).norm() / wanted.norm()) for x in (ours, eager)]
        print(f"   {name:<33} coda {errors[0]:.1e}   eager {errors[1]:.1e}   {ran} Regions ran")


if __name__ == "__main__":
    main()
