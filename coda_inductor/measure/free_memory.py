"""The GPU memory that measuring may take: what is free beside the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from coda_inductor.core import blocks
from coda_inductor.core.errors import Unsupported

NO_GPU = RuntimeError, AssertionError, ValueError
HINT = "compile before memory is filled, or CODA_INDUCTOR_TUNE=off"
# Beside the tensors of what is measured: those of the work beside it (timing.company_on, 66 MB), of the check of a
# kernel (six values of blocks.NUMBERS), and cuBLAS's and Triton's own.
BESIDE = 128 << 20
CHECK = 6 * 4 * blocks.NUMBERS


def free(device: torch.device) -> float:
    """Bytes that tensors may take on a device without taking any from others: what no process has, and what torch has
    reserved and gives to none; of what this process may have at most. Infinite without a GPU."""
    try:
        unused, whole = torch.cuda.mem_get_info(device)
    except NO_GPU:
        return math.inf
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    with contextlib.suppress(*NO_GPU, AttributeError):  # torch 2.11 may not tell
        unused = min(unused, int(torch.cuda.get_per_process_memory_fraction(device) * whole) - reserved)
    return unused + reserved - allocated


def require(device: torch.device, needed: float) -> None:
    """Raises Unsupported if measuring that takes so many bytes of tensors would take more than is free."""
    needed, there = needed + BESIDE + CHECK, free(device)
    if needed > there:
        what = f"measuring it takes {_gb(needed)} of GPU memory, and {_gb(there)} are free"
        raise Unsupported(what, hint=HINT)


@contextlib.contextmanager
def given_back(device: torch.device) -> Iterator[None]:
    """What torch reserves within, and nothing uses at the end, goes back to the card."""
    before = torch.cuda.memory_reserved(device)
    try:
        yield
    finally:
        if torch.cuda.memory_reserved(device) > before:
            torch.cuda.empty_cache()


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
