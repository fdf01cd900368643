"""What the examples share: a step of the user's by both backends, timed side by side, and data that needs no download.

`compare` times each backend alone for some seconds, by turns, prints a table and appends a JSON line to --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = ("inductor", "coda")
TURNS, WARM_UP, LAST = 3, 4, 50
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "transformers", "accelerate", "peft", "torchao")

Step = Callable[[], Tensor]


def arguments(text: str | None, sizes: dict[str, tuple[int, int]], **words: str) -> argparse.Namespace:
    """The command line. `sizes` gives for each option its value on a GPU and that of --small, `words` options that are
    texts. `device` is added."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="on a CPU in seconds; its times say nothing")
    parser.add_argument("--out", type=Path, help="append a JSON line to this file")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn of a backend; default: %(default)s")
    what = "before any is timed; the loss of the first is printed, and the mean of the last 50; default: %(default)s"
    parser.add_argument("--train-steps", type=int, default=WARM_UP, help=what)
    for name, default in words.items():
        parser.add_argument(f"--{name}", default=default, help="default: %(default)s")
    for name, (full, small) in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {full}, {small} with --small")
    chosen = parser.parse_args()
    for name, pair in sizes.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, pair[chosen.small])
    if not chosen.small and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --small runs on a CPU")
    if chosen.small:
        os.environ.setdefault("CODA_INDUCTOR_TARGET", "reference")  # what is derived runs on torch
        chosen.seconds = 0.0
    chosen.device = "cpu" if chosen.small else "cuda"
    return chosen


@cache
def standard_library() -> Tensor:
    """The bytes of Python's own modules, up to 8 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    read = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(read[: 8 << 20]), dtype=torch.uint8)


def batches(batch: int, length: int, device: str, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes [batch, length] as tokens and the bytes that follow each, without end; the same ones for each seed."""
    data, generator = standard_library(), torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(data) - length - 1, (batch, 1), generator=generator)
        window = data[start + torch.arange(length + 1)].long()
        if device == "cuda":  # the host goes on while it is copied
            window = window.pin_memory().to(device, non_blocking=True)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated(peak: bool = False) -> float:
    """GiB of GPU memory, now or at the peak."""
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30


def slowest(seconds: float) -> float:
    """Of all ranks, so that each does the same."""
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(seconds, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(step: Step, count: int) -> float:
    """Seconds of a step, of `count` without a pause."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return slowest((time.perf_counter() - start) / count)


def prepared(make: Callable[[str], Step], backend: str, count: int) -> tuple[Step, dict[str, Any]]:
    """A step that is compiled, the losses of `count` steps, seconds to the end of the fourth, and GiB: what is held and
    what a step adds."""
    gc.collect()
    held = allocated()
    start = time.perf_counter()
    step = make(backend)
    losses = [float(step()) for _ in range(WARM_UP)]
    seconds = time.perf_counter() - start
    losses += [float(step()) for _ in range(count - WARM_UP)]
    if not torch.cuda.is_available():
        return step, {"losses": losses, "compile_s": seconds, "gib": None}
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return step, {"losses": losses, "compile_s": seconds, "gib": allocated(peak=True) - held}


def compare(
    case: str, make: Callable[[str], Step], chosen: argparse.Namespace, count: int, unit: str = "tokens"
) -> dict[str, Any]:
    """Runs `make(backend)()`, a step of `count` tokens on all ranks together, by both backends; returns the row."""
    torch.manual_seed(0)
    steps, found = dict[str, Step](), dict[str, dict[str, Any]]()
    for backend in BACKENDS:
        steps[backend], found[backend] = prepared(make, backend, chosen.train_steps)
    often = {b: max(1, round(chosen.seconds / timed(step, 1))) for b, step in steps.items()}
    turns: dict[str, list[float]] = {b: [] for b in BACKENDS}
    for _ in range(TURNS):
        for b in BACKENDS:
            timed(steps[b], 1)
            turns[b].append(timed(steps[b], often[b]))
    for b in BACKENDS:
        found[b]["ms"] = 1e3 * statistics.median(turns[b])
    theirs, ours = (found[b] for b in BACKENDS)
    row = {
        "case": case, "mode": "infer" if unit == "images" else "train", "ms": ours["ms"], "baseline_ms": theirs["ms"],
        "speedup": theirs["ms"] / ours["ms"], "gib": ours["gib"], "baseline_gib": theirs["gib"],
        f"{unit}_per_s": 1e3 * count / ours["ms"], f"baseline_{unit}_per_s": 1e3 * count / theirs["ms"],
        "compile_s": {b: found[b]["compile_s"] for b in BACKENDS}, "losses": {b: found[b]["losses"] for b in BACKENDS},
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "machine": torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU", "versions": versions(),
        "command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(table(row, found, count, unit), flush=True)
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return row


def table(row: dict[str, Any], found: dict[str, dict[str, Any]], count: int, unit: str) -> str:
    """The row for people."""
    lines = [row["case"], f"{row['machine']}, torch {row['versions']['torch']}", ""]
    what = "loss" if unit == "tokens" else "mean"
    lines.append(f"{'':10}{'ms':>10}{f'{unit}/s':>13}{'peak GiB':>10}{'compile s':>11}   {what}")
    for b in BACKENDS:
        side = found[b]
        gib = "-" if side["gib"] is None else f"{side['gib']:.2f}"
        few = side["losses"][-min(LAST, len(side["losses"]) // 4) :]
        losses = f"{side['losses'][0]:.4f} -> {statistics.fmean(few):.4f}"
        speed = f"{1e3 * count / side['ms']:,.{0 if unit == 'tokens' else 2}f}"
        lines.append(f"{b:10}{side['ms']:>10.2f}{speed:>13}{gib:>10}{side['compile_s']:>11.1f}   {losses}")
    memory = "" if row["gib"] is None else f", {row['gib'] / row['baseline_gib']:.3f} of the memory"
    return "\n".join([*lines, f"coda: {row['speedup']:.3f} times as fast as inductor{memory}"])


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in ("coda-inductor", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
