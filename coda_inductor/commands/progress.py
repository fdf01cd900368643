"""What a command says while it works: one line on a terminal, gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Say]:
    """Within, a line on stderr says `what` is being done, and for how long. Calling what it yields changes the words.
    No line if not `shown` (as under --json), or if stderr is no terminal. Warnings and prints stand above the line.

        with progress("compiling", shown=not arguments.json) as say:
            ...
            say("timing")
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda text: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as line:
        task = line.add_task(what, total=None)
        yield lambda text: line.update(task, description=text)
