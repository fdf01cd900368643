"""Models of coverage_zoo.py on a GPU, at full width, with random inputs: times and memory of both backends.

    python bench/zoo.py NAME ... [--body] [--modes infer train] [--seconds S] [--rounds R] [--out FILE.jsonl]

A row for each model and mode, as `coda-inductor bench` writes them. Token ids are drawn from the model's vocabulary,
all other inputs from a normal distribution. `--body` leaves out head and loss: layers behind a small embedding, in
training with random gradients of what they return.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from typing import Any

import models
import torch
from coverage_cases import Called, Case, decoder, made, sizes
from coverage_zoo import ALTERNATE, MODELS
from torch import Tensor, nn

from coda_inductor.commands.bench import bench, render, written
from coda_inductor.core.settings import Settings

GEMMA = sizes(3840, 15360, 16, 8, 262208, head_dim=256, sliding_window=1024, layer_types=ALTERNATE)
CASES = MODELS | {"gemma3_12b": decoder("Gemma3", GEMMA, config="Gemma3TextConfig")}
OWN = {"dit_xl_blocks": (models.MODELS["dit-xl"], 2), "eva02_l_blocks": (models.MODELS["eva02-l"], 3)}
"""Models of our own, and how many blocks they have."""
SMALL = 1024  # tokens of an embedding that is not to be measured


def body(case: Case) -> Case:
    """The layers alone."""
    name = case.model.replace("ForCausalLM", "Model").replace("ForMaskedLM", "Model")
    name = name.replace("Gemma3Model", "Gemma3TextModel")
    return replace(case, model=name, loss=False, sizes={**case.sizes, "vocab_size": SMALL})


def built(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """(model, args) on the GPU, with random weights and inputs."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = made(case)
    return Called(model, case), tuple(drawn(x, case) for x in case.inputs.values())


def drawn(like: Tensor, case: Case) -> Tensor:
    """Random values in the shape of an input."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, device="cuda")
    return torch.randint(1, case.sizes.get("vocab_size", 1000), like.shape, device="cuda")


def main() -> None:
    """Measures, and prints each row for people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help=" or ".join(CASES | OWN))
    parser.add_argument("--modes", nargs="*", choices=("infer", "train", "step"), default=["infer", "train"])
    parser.add_argument("--body", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", metavar="FILE.jsonl")
    given = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    for name in given.names:
        for mode in given.modes:
            try:
                row = measured(name, mode, given) | {"command": command}
            except Exception as error:  # the next is measured all the same, and the row that is missing is seen
                print(f"{name} {mode}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
                continue
            print(render(row), flush=True)
            print(json.dumps(row), flush=True)
            if given.out:
                written(row, given.out)


def measured(name: str, mode: Any, given: argparse.Namespace) -> dict[str, Any]:
    """A row; what the model took is given back."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        if name in OWN:
            (build, inputs), blocks = OWN[name]
            model, args = build().to("cuda", torch.bfloat16), inputs()
            said = f"{name.removesuffix('_blocks')}, {blocks} blocks"
        else:
            case = body(CASES[name]) if given.body else CASES[name]
            model, args = built(case)
            said = f"{name}, {case.layers} layers" + " and head" * (not given.body)
        timed = {"seconds": given.seconds, "rounds": given.rounds}
        return bench(model, args, {}, mode, Settings.read()[0], said, **timed)
    finally:
        model = args = None
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
