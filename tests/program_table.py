"""Tables of functions with what makes their inputs, which a decorator fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Inputs = Callable[[], tuple[Tensor, ...]]
Table = dict[str, tuple[Callable[..., Any], Inputs]]


def into(table: Table) -> Callable[[Inputs], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The decorator that puts a function into the table, with a function that makes its inputs."""

    def case(inputs: Inputs) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def keep(f: Callable[..., Any]) -> Callable[..., Any]:
            table[f.__name__] = f, inputs
            return f

        return keep

    return case
