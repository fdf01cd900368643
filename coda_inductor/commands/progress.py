"""What a command is doing, as one line that changes, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def shown(wanted: bool) -> Iterator[Callable[[str], None]]:
    """Within, what is told to the function that it gives stands on stderr with a moving sign; nowhere if stderr is no
    terminal, or it is not `wanted`."""
    if not wanted or not sys.stderr.isatty():
        yield lambda what: None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update
