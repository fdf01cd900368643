"""A head with its loss, forward and backward: in blocks of rows, whole, and as others make it.

    python bench/heads.py [CASE ...] [--chunk ROWS ...] [--ways WAY ...] [--seconds S] [--out FILE]

32768 tokens of width 2048, bfloat16. A case is a vocabulary (32000, 128256) and, behind a colon, what the scores go
through: nothing, "cap" (15 tanh(z / 15) in float32), "returned" (the scores are a result, too); or what the loss is:
"z" (with a z-loss), "smooth" (of smoothed labels). Each is timed alone for seconds, by turns: "ms" by backend, with the
peak of memory over what lies there before ("gib").

- inductor, null: torch.compile, twice
- chunker: torch.compile with TORCHINDUCTOR_AUTO_CHUNKER
- liger: its fused linear cross-entropy (where it is installed; of plain scores)
- whole: ours with disable="blocks"
- coda-ROWS: ours with chunk=ROWS
- scores-ROWS: the same with disable="loss", so that scores are stored and a pass makes their gradient of them

--ways takes some of these alone, with inductor.

"error" is the distance of the gradients of x and of the weight from those of float32 products, beside their norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.measure.sides import peak_gib

TOKENS, WIDTH = 32768, 2048
CASES = ("32000", "128256", "32000:cap", "128256:cap", "32000:returned", "32000:z", "32000:smooth")
Call = Callable[[], Any]


def loss(x: Tensor, weight: Tensor, target: Tensor, through: str) -> tuple[Tensor, ...]:
    """The loss, and what else is returned."""
    z = F.linear(x, weight)
    wide = 15 * torch.tanh(z.float() / 15) if through == "cap" else z.float()
    value = F.cross_entropy(wide, target, label_smoothing=0.1 if through == "smooth" else 0.0)
    if through == "z":
        counted = target != -100
        value = value + 1e-4 * (wide.logsumexp(-1).square() * counted).sum() / counted.sum()
    return (value, z) if through == "returned" else (value,)


def liger(x: Tensor, weight: Tensor, target: Tensor, through: str) -> tuple[Tensor, ...]:
    """Its fused operation."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    return (Fused.apply(x, weight, target)[0],)


def backends(through: str, chunks: list[int], wanted: list[str]) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """The same function, compiled in different ways: in those that are wanted, or in all."""
    coda = {f"coda-{c}": {"options": {"chunk": c}, "backend": "coda"} for c in chunks}
    coda |= {f"scores-{c}": {"options": {"chunk": c, "disable": "loss"}, "backend": "coda"} for c in chunks}
    ways: dict[str, dict[str, Any]] = {
        "inductor": {},
        "null": {},
        "chunker": {"options": {"auto_chunker.enable": True}},
        "whole": {"backend": "coda", "options": {"disable": "blocks"}},
        **coda,
    }
    found: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
    for name, options in ways.items():
        if wanted and name not in ("inductor", *wanted):
            continue

        def fresh(x: Tensor, weight: Tensor, target: Tensor, through: str) -> tuple[Tensor, ...]:
            return loss(x, weight, target, through)

        fresh.__code__ = loss.__code__.replace(co_name=f"loss_{name.replace('-', '_')}")
        found[name] = torch.compile(fresh, dynamic=False, fullgraph=True, **options)
    others = not wanted or "liger" in wanted
    return found | ({"liger": liger} if others and through == "" and has_liger() else {})


def has_liger() -> bool:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def gradients(call: Callable[..., tuple[Tensor, ...]], x: Tensor, weight: Tensor, target: Tensor, through: str) -> Call:
    """Forward and backward."""

    def step() -> list[Tensor]:
        value, *_ = call(x, weight, target, through)
        return [value.detach(), *torch.autograd.grad(value, (x, weight))]

    return step


def alone(step: Call, seconds: float) -> float:
    """Milliseconds of a call, repeated for a while."""
    step()
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step()
        count += 1
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def exact(x: Tensor, weight: Tensor, target: Tensor, through: str) -> list[Tensor]:
    """The gradients of x and of the weight, of float32 products, by hand in blocks."""
    wide, parts = weight.detach().float().requires_grad_(), []
    count = int((target != -100).sum())
    for some, labels in zip(x.detach().split(2048), target.split(2048), strict=True):
        rows = some.float().requires_grad_()
        part = loss(rows, wide, labels, through)[0] * (int((labels != -100).sum()) / count)
        part.backward()
        parts.append(rows.grad)
    return [torch.cat(parts), wide.grad]


def drawn(vocabulary: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight, and targets, of which some do not count."""
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH, device="cuda") * 0.02).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device="cuda")
    return x, weight, target.where(target % 50 != 0, -100)


def measure(case: str, chunks: list[int], ways: list[str], seconds: float, rounds: int = 3) -> dict[str, Any]:
    """A row."""
    vocabulary, _, through = case.partition(":")
    calls = backends(through, chunks, ways)
    x, weight, target = drawn(int(vocabulary), TOKENS)
    steps = {name: gradients(call, x, weight, target, through) for name, call in calls.items()}
    want, gib, taken = exact(x, weight, target, through), {}, {}
    error: dict[str, list[float]] = {}
    for name in list(steps):
        start = time.perf_counter()
        try:
            found = steps[name]()[1:]
        except torch.OutOfMemoryError:
            del steps[name]
            torch.cuda.empty_cache()
            continue
        error[name] = [round(float((a - b).norm() / b.norm()), 5) for a, b in zip(found, want, strict=True)]
        del found
        taken[name] = round(time.perf_counter() - start, 1)
        gib[name] = round(peak_gib(steps[name]) or 0.0, 3)
    del want
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(alone(step, seconds))
    ms = {name: round(statistics.median(t), 3) for name, t in times.items()}
    ratio = {name: round(ms["inductor"] / t, 4) for name, t in ms.items()}
    return {
        "case": case, "tokens": TOKENS, "width": WIDTH, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "ms": ms, "ratio": ratio, "gib": gib, "error": error, "compile_s": taken,
    }  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--chunk", nargs="*", type=int, default=[4096])
    parser.add_argument("--ways", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for case in given.cases:
        row = measure(case, given.chunk, given.ways, given.seconds)
        print(json.dumps(row), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
