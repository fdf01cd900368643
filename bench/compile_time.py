"""Seconds to compile a model with nothing on disk (cold) and again (warm): backend="coda" and torch.compile's default,
each in a fresh process.

    python bench/compile_time.py [--mode train] [--backends inductor coda hinted] [--layers N] [--width WIDTH]
        [--tokens N] [--vocab N] [--warm N] [--out FILE]

Of "hinted" the rows say "coda, hinted": tuning starts from what is shipped (tuning/shipped.py); "coda" is without.
--keep FOLDER leaves the caches of the last coda there, for `coda-inductor cache hints`.

`--warm N` starts each backend warm N times, by turns; the row is of their median, all are its "starts_s".
Python's bytecode is written in the cold start, as an installation writes it.

One JSON line for each backend and start, as bench/layers.py writes them. The model is Llama's, by default in the sizes
of its 1B, with random weights. "compile_s" is the first call, its run included, "call_s" the median of later ones.
"kernels" are the objects that the process added to our store, "measured" the records, "inductor_kernels" what Inductor
added to its own: in a warm start all three are to be 0. (Torch.compile's own has a kernel whose name is too
long for its cache: inductor/post_pass.py.)
"split" says where the seconds of ours go: "rewriting" is all of our pass; of it "programs" compiles the other side's
programs while kernels are compiled, "kernels" waits for those, "contests" searches tiles and times groups, "laws" times
groups against programs without their law, "plain" products with cuBLAS, and the rest is "derivation". "hinted" of the
"groups" took one timing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from coda_inductor.codegen import target
from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch
from coda_inductor.tuning.measurements import Measurements
from coda_inductor.tuning.plain_products import PlainTuner

BACKENDS = ("inductor", "coda")
HINTED = "coda, hinted"
CALLS = 5  # after the first


def llama(layers: int, width: int, vocab: int, device: str) -> torch.nn.Module:
    """transformers' Llama in the proportions of Llama-3.2-1B, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // 64
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), vocab_size=vocab, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16).eval()


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, to its end on the device."""
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Split(logging.Handler):
    """The seconds of our pass, by what they are for: from what it logs, and two functions that are timed."""

    SAID: ClassVar = {"%d groups to": {2: "programs"}, "waited %.1f s": {0: "kernels", 1: "contests"}}

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds = dict.fromkeys(("rewriting", "programs", "kernels", "contests", "laws", "plain"), 0.0)
        log = logging.getLogger("coda_inductor.tuning")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self)
        timed = (
            (joint_pass, "rewrite", "rewriting"), (Measurements, "against", "laws"), (PlainTuner, "__call__", "plain")
        )  # fmt: skip
        for owner, name, part in timed:
            setattr(owner, name, self.counted(getattr(owner, name), part))

    def emit(self, record: logging.LogRecord) -> None:
        """Adds what a line says. Hints that did not hold are printed."""
        if "a hint does not hold" in str(record.msg):
            print(record.getMessage(), file=sys.stderr, flush=True)
        for start, parts in self.SAID.items():
            if str(record.msg).startswith(start) and isinstance(record.args, tuple):
                for place, part in parts.items():
                    self.seconds[part] += float(str(record.args[place]))

    def counted(self, whole: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, whose time is added to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return whole(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return run

    def facts(self) -> dict[str, float]:
        """The parts, and the rest."""
        rest = 2 * self.seconds["rewriting"] - sum(self.seconds.values())
        return {name: round(s, 2) for name, s in (*self.seconds.items(), ("derivation", rest))}


def measure(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """The half of a row that only the process that compiles can know."""
    device, split = "cuda" if torch.cuda.is_available() else "cpu", Split()
    model = llama(args.layers, args.width, args.vocab, device).train(args.mode == "train")
    ids = torch.randint(0, args.vocab, (1, args.tokens), device=device)
    compiled = torch.compile(model, backend=backend)

    def call() -> object:
        if args.mode == "infer":
            return compiled(ids, use_cache=False).logits
        model.zero_grad()
        loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    with torch.set_grad_enabled(args.mode == "train"):
        first = timed(call, device)
        later = statistics.median(timed(call, device) for _ in range(CALLS))
        launch.LAUNCHES.clear()
        call()
    cached = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    timings = [row for report in REPORTS for row in report.timings]
    return {
        "compile_s": first, "call_s": later, "launched": sum(launch.LAUNCHES.values()), "cache_hits": cached,
        "regions": sum(len(report.sites) for report in REPORTS), "fallbacks": sum(launch.FALLBACKS.values()),
        "split": split.facts(), "groups": len(timings), "hinted": sum("hinted" in row for row in timings),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": {**target.versions(), "python": platform.python_version()},
    }  # fmt: skip


def made(folder: Path) -> dict[str, int]:
    """What lies in the caches: our kernels and records, and Inductor's kernels (on a CPU its libraries)."""
    theirs = "*.cubin" if torch.cuda.is_available() else "*.so"
    kinds = {
        "kernels": "coda/objects/**/*.o",
        "measured": "coda/tuning/*.json",
        "inductor_kernels": f"inductor/**/{theirs}",
    }
    return {name: sum(1 for _ in folder.glob(pattern)) for name, pattern in kinds.items()}


def start(backend: str, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """A process with its caches in `folder`: what it measured, and what it added there."""
    places = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "inductor/triton", "CODA_INDUCTOR_CACHE_DIR": "coda",
        "QUACK_CACHE_DIR": "quack", "CUTE_DSL_CACHE_DIR": "cutlass",
    }  # fmt: skip
    environment = os.environ | {name: str(folder / place) for name, place in places.items()}
    environment |= {"CODA_INDUCTOR_HINTS": "1" if backend == HINTED else "0", "PYTHONDONTWRITEBYTECODE": ""}
    folder.mkdir(parents=True, exist_ok=True)
    before = made(folder)
    command = [sys.executable, __file__, *arguments, "--only", "inductor" if backend == "inductor" else "coda"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {name: count - before[name] for name, count in made(folder).items()}


def rows(args: argparse.Namespace, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Cold and warm, of each backend, as they are measured."""
    case = f"llama {args.layers} x {args.width}, {args.tokens} tokens, vocabulary {args.vocab}"
    said = {"case": case, "mode": args.mode, "command": " ".join(["python", *sys.argv])}
    backends = [HINTED if name == "hinted" else name for name in args.backends]
    with tempfile.TemporaryDirectory() as root:
        folders = {backend: Path(root, str(i)) for i, backend in enumerate(backends)}
        for backend, folder in folders.items():
            yield said | {"backend": backend, "cache": "cold"} | start(backend, folder, arguments)
            if args.keep and (folder / "coda").exists():
                shutil.copytree(folder / "coda", args.keep, dirs_exist_ok=True)
        warm: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
        for i in range(args.warm):
            for backend in backends if i % 2 else reversed(backends):
                warm[backend].append(start(backend, folders[backend], arguments))
        for backend, found in warm.items() if args.warm else ():
            starts = sorted(found, key=lambda row: row["compile_s"])
            median = starts[len(starts) // 2] | {"compile_s": statistics.median(row["compile_s"] for row in starts)}
            seconds = [row["compile_s"] for row in found]
            yield said | {"backend": backend, "cache": "warm"} | median | {"starts_s": seconds}


def main() -> None:
    """Runs the four processes and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("width", 2048), ("tokens", 2048), ("vocab", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mode", choices=("infer", "train"), default="infer")
    parser.add_argument("--backends", nargs="+", choices=(*BACKENDS, "hinted"), default=BACKENDS)
    parser.add_argument("--warm", type=int, default=1, metavar="N", help="warm starts of each")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the caches of coda there")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "compile_time.jsonl"))
    parser.add_argument("--only", choices=BACKENDS, help=argparse.SUPPRESS)  # what a process of ours is asked to do
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    for row in rows(args, sys.argv[1:]):
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{row['backend']:14s} {row['cache']:5s} {row['compile_s']:7.2f} s, a call {row['call_s'] * 1e3:8.2f} ms,"
            f" {row['kernels']} kernels and {row['measured']} records of ours, {row['inductor_kernels']} of Inductor's,"
            f" {row['launched']} launched, {row['cache_hits']} cache hits, {row['hinted']} of {row['groups']} timings"
            f" by hints; {row['split']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
