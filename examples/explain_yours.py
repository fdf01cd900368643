"""What coda-inductor derives for a model of yours, asked from Python: no GPU, no weights, nothing is run.

    python examples/explain_yours.py                              # the model below, for Hopper
    python examples/explain_yours.py --model my_module:build      # yours: a function that returns (model, args)
    python examples/explain_yours.py --small                      # the model below, smaller, as it would run on torch

The same facts as `coda-inductor explain`. Replace `build` by your model, or name it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render


class Mixer(nn.Module):
    """A model that nobody has heard of: a gated branch of its own kind behind a norm that is spelled out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.gate, self.value = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.back = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.write(F.gelu(self.read(x)))
        n = self.gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x + self.back(self.gate(n).sigmoid() * self.value(n).tanh())  # type: ignore[no-any-return]


def build(width: int = 4096, tokens: int = 8192) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its arguments, on the meta device: no memory."""
    with torch.device("meta"):
        return Mixer(width).bfloat16(), (torch.empty(tokens, width, dtype=torch.bfloat16),)


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="returns (model, args) or (model, args, kwargs)")
    parser.add_argument("--small", action="store_true", help="for the programs that run on torch")
    chosen = parser.parse_args()
    if chosen.model:
        sys.path.insert(0, "")
        module, _, function = chosen.model.partition(":")
        model, args, *rest = getattr(importlib.import_module(module), function)()
    else:
        (model, args), rest = build(64, 512) if chosen.small else build(), []
    found = {}
    for mode in ("infer", "train"):
        settings = Settings(target="reference" if chosen.small else "sm_90a")
        facts = found[mode] = explain(model, args, rest[0] if rest else {}, mode, settings)
        totals = facts["totals"]
        laws = Counter(law for graph in facts["graphs"] for region in graph["regions"] for law in region["laws"])
        print(f"--- {mode}: {totals['regions']} Regions")
        print(f"memory-bound kernels: {totals['kernels_before']} -> {totals['kernels_after']}")
        print(f"bytes they and epilogues move: {totals['bytes_before']:,} -> {totals['bytes_after']:,}")
        print("laws: " + (", ".join(f"{law} {n} times" for law, n in laws.items()) or "none"))
        print(render(facts), end="\n\n")
    return found


if __name__ == "__main__":
    main()
