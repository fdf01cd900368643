"""What may keep a group from being measured, beside which the others are measured all the same."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported, forget_frames
from coda_inductor.measure.free_memory import HINT
from coda_inductor.patterns import graph as g

log = logging.getLogger("coda_inductor.contest")


def unmeasured(error: Exception, product: fx.Node) -> Unsupported:
    """Why a group could not be measured, at which line of the user's, and what to do."""
    if isinstance(error, Unsupported):
        return Unsupported(error.what, where=error.where or g.source_line(product), hint=error.hint)
    return Unsupported("out of memory while it was measured", where=g.source_line(product), hint=HINT)


@contextlib.contextmanager
def passing_over() -> Iterator[None]:
    """Goes on where one group fails in a way that is foreseen."""
    try:
        yield
    except Exception as error:
        if not foreseen(error):
            raise
        log.info("not measured: %s", error)
        forget_frames(error)


def foreseen(error: Exception) -> bool:
    """May a group fail so, and the others be measured all the same?"""
    return isinstance(error, Unsupported) or out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    """Torch has a class for it, which Inductor wraps; the driver and cuBLAS say it in words."""
    full = isinstance(error, RuntimeError) and any(said in str(error) for said in ("out of memory", "ALLOC_FAILED"))
    return full or isinstance(error, torch.OutOfMemoryError)
