"""The snippets of docs/using.md: how they are found, what they are given, and how one is run and held to its like.

A comment before a fenced block says where it runs: `<!-- run: cpu, compare=NAME -->`. Further words are

    needs=PACKAGE   it is skipped where this is missing
    compare=NAME    the variable that is compared with the same program's by the backend `against`, eager if not given
    tolerance=X     how far it may be from that, relative (1e-6 if not given), and gradients a hundred times as far
                    (AdamW's first steps are signs of gradients, which flip where one is nothing but rounding)
    regions=0       none are derived; else some are
    ranks=2         in the place of cpu: by two processes, gloo's on a CPU, with the variables that torchrun sets

`shell` is a block of commands, `<!-- file: NAME -->` a module that commands read.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from quick import quick
from torch import Tensor

from coda_inductor.inductor.joint_pass import REPORTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "using.md"
BLOCK = re.compile(r"<!-- (run|file): ([^\n]+) -->\n```(?:python|sh)\n(.*?)```", re.DOTALL)
RANKS, LENGTH, VOCABULARY = 2, 64, 96
PATIENCE = timedelta(seconds=60)
KEPT = list[dict[str, Any]]()
"""The names of what ranks have run. Where DDP's go after its group, on gloo, ranks waited for ever in 4 runs of 7:
the group's own thread for Python, and Python for that thread (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block below the heading `title`; `kind` is cpu, ranks, shell or file."""

    title: str
    kind: str
    told: dict[str, str]
    code: str

    def against(self) -> str:
        """The program that it is held to: another backend, without our options."""
        other = re.sub(r", options=(\{[^}]*\}|options)", "", self.code)
        return other.replace('"coda"', f'"{self.told.get("against", "eager")}"')


def snippets() -> list[Snippet]:
    """All of the page, in its order."""
    text, found = PAGE.read_text(), []
    for block in BLOCK.finditer(text):
        title = re.findall(r"^## (.*)$", text[: block.start()], re.MULTILINE)[-1]
        kind, *words = block[2].split(", ") if block[1] == "run" else ("file", f"name={block[2]}")
        told = dict(word.split("=") for word in words)
        found.append(Snippet(title, kind.partition("=")[0], told, block[3]))
    return found


def given(layers: int) -> dict[str, Any]:
    """What a snippet finds: a model in float64 and its data; a DiT's inputs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False, initializer_range=0.3,  # the loss feels an error of a per cent
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    ids = torch.randint(VOCABULARY, (2, 4, LENGTH))
    batches = [{"input_ids": one, "labels": one} for one in ids]
    return {
        "torch": torch, "model": model, "batch": batches[0], "batches": batches, "device": "cpu",
        "rows": [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)],
        "start": {n: p.detach().clone() for n, p in model.named_parameters()},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "latents": torch.randn(2, 4, 16, 16), "times": torch.tensor([10, 900]), "labels": torch.tensor([1, 7]),
    }  # fmt: skip


@contextmanager
def interpreted() -> Iterator[None]:
    """The graphs that Inductor would compile are interpreted, ours and, by backend="inductor", its own."""
    compile_fx = partial(torch._inductor.compile_fx.compile_fx, inner_compile=evaluate._interpreted)  # type: ignore[arg-type]
    with evaluate.strict_reference(run=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
        yield


def apart(found: Any, wanted: Any) -> float:
    """Relative, Frobenius."""
    a, b = (torch.as_tensor(x).detach().double() for x in (found, wanted))
    assert a.shape == b.shape and bool(a.isfinite().all())
    return float((a - b).norm() / b.norm()) if bool(b.any()) else float(a.norm())


def gradients(names: dict[str, Any]) -> dict[str, Tensor]:
    """Of the model, this rank's part; where the optimizer has taken them, by how much each parameter moved."""
    grads: dict[str, Any] = {n: p.grad for n, p in names["model"].named_parameters() if p.grad is not None}
    if not grads and len(names["start"]) == len(list(names["model"].parameters())):
        moved = {n: p.detach() - names["start"][n] for n, p in names["model"].named_parameters()}
        grads = {n: d for n, d in moved.items() if bool(d.any())}
    return {n: getattr(g, "_local_tensor", g) for n, g in grads.items()}


def executed(snippet: Snippet, code: str) -> dict[str, Any]:
    """The names after it has run."""
    torch._dynamo.reset()
    names = given(2 if snippet.kind == "ranks" else 1)
    exec(compile(code, f"docs/using.md, {snippet.title}", "exec"), names)
    return names


def held(snippet: Snippet) -> dict[str, Any]:
    """Runs the snippet and what it is held to: how far apart they are, and the Regions of the first."""
    found = list[dict[str, Any]]()
    for code in (snippet.code, snippet.against()):
        assert code != snippet.code or not found, "it is held to itself"
        if not found:
            REPORTS.clear()
        found.append(executed(snippet, code))
    KEPT.extend(found if snippet.kind == "ranks" else ())
    regions = [len(report.sites) for report in REPORTS]  # the other backend makes none
    ours, theirs = map(gradients, found)
    assert ours.keys() == theirs.keys()
    return {
        "title": snippet.title, "regions": regions,
        "error": apart(*(names[snippet.told["compare"]] for names in found)),
        "gradients": max((apart(g, theirs[n]) for n, g in ours.items()), default=0.0), "count": len(ours),
    }  # fmt: skip


def main(place: str) -> None:
    """One rank: prints a line for each snippet of ranks. The variables of torchrun say which rank; at each start the
    ranks meet by a file in that folder, as a port that is free may be taken until then."""
    quick()
    torch.set_num_threads(1)
    who: Any = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"]), "timeout": PATIENCE}
    start, files = dist.init_process_group, (f"file://{place}/{i}" for i in count())
    for snippet in (s for s in snippets() if s.kind == "ranks"):
        with interpreted(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", lambda: start(init_method=next(files), **who))
            print(json.dumps(held(snippet)), flush=True)
    os._exit(0)  # with what is kept


if __name__ == "__main__":
    main(sys.argv[1])
