"""How the commands say things: aligned columns, sizes, dates."""

from __future__ import annotations

import time
from collections.abc import Sequence

TRUST = "Importing a cache loads code from it: import only archives of people you trust."


def table(rows: Sequence[Sequence[object]], indent: str = "") -> list[str]:
    """One line per row, columns aligned, the last one as long as it is; None is said as "-"."""
    said = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in said if i < len(row)) for i in range(max(map(len, said), default=0))]
    return [indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in said]


def size(count: int) -> str:
    """A number of bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def date(seconds: float) -> str:
    """Local date and minute of a time stamp."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
