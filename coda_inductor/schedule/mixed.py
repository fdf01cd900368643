"""When Inductor sums over rows and over columns in one kernel ("mix-order reductions"): its rules, from its own source.

They differ from version to version and most stand in no configuration: torch 2.13 asks for twice as many rows as
columns, 2.15 does not. So the numbers are read where Inductor decides. What is not found there is not asked for.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from functools import cache

import torch
import torch._inductor.config as inductor_config
from torch._inductor import scheduler

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Rules:
    """Of a tensor [rows, columns]: the fewest rows, rows for each column, and elements, and the most columns, that are
    summed so; the dtypes of the sums over rows, any if empty."""

    rows: int = 0
    rows_per_column: int = 0
    elements: int = 0
    columns: int = UNLIMITED
    dtypes: frozenset[torch.dtype] = frozenset()


def rules_in(source: str) -> Rules:
    """The rules that the source of Inductor's MixOrderReduction states."""

    def number(pattern: str, otherwise: int = 0) -> int:
        found = re.search(pattern, source)
        factors = re.findall(r"(\d+)(?:\*\*(\d+))?", found[1]) if found else []
        return math.prod(int(base) ** int(power or 1) for base, power in factors) if found else otherwise

    dtypes = re.search(r"get_dtype\(\)[^{]*\{([^}]*)\}", source)
    return Rules(
        rows=number(r"Ge\(nrow, (\d+)\)"),
        rows_per_column=number(r"Ge\(nrow, ncol \* (\d+)\)"),
        elements=number(r"size_thres = ([\d* ]+)"),
        columns=number(r"leq\(ncol, ([\d* ]+)\)", UNLIMITED),
        dtypes=frozenset(getattr(torch, name) for name in re.findall(r"torch\.(\w+)", dtypes[1] if dtypes else "")),
    )


@cache
def rules() -> Rules | None:
    """The rules of the torch that is installed; None if it never sums so, or does not say when."""
    decides = getattr(scheduler, "MixOrderReduction", None)
    try:
        return rules_in(inspect.getsource(decides)) if decides is not None else None
    except OSError:
        return None


def allowed(rows: int, columns: int) -> bool:
    """Does Inductor sum a tensor [rows, columns] over both in one kernel, if nothing else is against it?"""
    known, config = rules(), inductor_config.triton
    if known is None or not getattr(config, "mix_order_reduction", False):
        return False
    enough = rows >= max(known.rows, known.rows_per_column * columns) and rows * columns >= known.elements
    return columns <= known.columns and (enough or getattr(config, "mix_order_reduction_non_strict_mode", False))


def adds(dtype: torch.dtype) -> bool:
    """Does such a kernel sum over the rows into this dtype?"""
    known = rules()
    return known is not None and (not known.dtypes or dtype in known.dtypes)


def most_reads() -> int:
    """How many tensors it reads at most, if it is to take in more."""
    return getattr(inductor_config.triton, "mix_order_reduction_max_reads", 0) or UNLIMITED
