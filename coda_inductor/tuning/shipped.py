"""Shipped tunings, the hints: for a card, the tile that won for a Region, and how its group fared.

A hint is found by the Region's structure (not by sources, versions or names), the card and the bucket of tokens. It
spares a search: a tile must be one that the search would time, its kernel's results are compared with the
interpreter's, and one timing must show that the kernel is about as fast, beside plain products of the same matrices, as
where the hint was made. Then how the group fared there against Inductor is taken as said: that takes no program of
Inductor's, which is what a search waits for. Where the timing shows something else, the ordinary search follows. What
cannot be read is no hint. `coda-inductor cache hints` writes these files (commands/caches/hints.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coda_inductor.codegen import legality
from coda_inductor.codegen.tiles import Config, tiles
from coda_inductor.core.region import Region

log = logging.getLogger("coda_inductor.tuning")

FOLDER = Path(__file__).with_name("hints")
SCHEMA = 2
# How far a kernel's time over that of plain products may lie from what a hint says. In another process, on the tensors
# of a model, 6 of 20 Regions lay 5 to 9 % off (H100, bench/compile_time.py): so much says nothing against a verdict,
# which was timed interleaved, to 1.2 % (outcome.py, LONG_WIN). Beyond, the hint speaks of something else.
OFF = 0.1
TILE = re.compile(r"[0-9]{1,4}x[0-9]{1,4}(pp|co)[0-9]{1,2}x[0-9]{1,2}n?")


def structure(region: Region) -> str:
    """Names what decides a Region's tile: its text without the constants of its epilogue, as a norm's epsilon. The same
    in all processes, on all machines and with all versions."""
    return _structure(region.text)


@functools.lru_cache(maxsize=4096)
def _structure(text: str) -> str:
    fields = json.loads(text)
    for let in fields["lets"]:
        let["args"] = [a if isinstance(a, str) else "#" for a in let["args"]]
    kept = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def together(*sides: Sequence[str]) -> str:
    """Names a group by its Regions' structures, or a group and what it is compared with."""
    return hashlib.sha256("|".join("+".join(side) for side in sides).encode()).hexdigest()[:16]


def file_of(card: str) -> str:
    """The name of the file for a card, as torch names it."""
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") + ".json"


class Tile(NamedTuple):
    """The tile that won for a Region, and its kernel's time over that of plain products of the same matrices, by turns
    (None: not known)."""

    config: Config
    share: float | None

    def holds(self, share: float) -> bool:
        """Is one timing near it? One that is far faster is not either: what it was compared with may have changed."""
        return self.share is not None and abs(share - self.share) <= OFF * self.share


class Expected(NamedTuple):
    """How a group fared: whether it won, the other side's time over its own interleaved, and whether its law stood
    against the program without it, or won by so much that nobody asked. None: not known, or there is no law."""

    wins: bool
    ratio: float
    stands: bool | None = None


class Hints:
    """Those of one card. `refused` are the Regions, with their buckets, whose hint did not hold in this compile."""

    def __init__(self, rows: dict[str, Any]) -> None:
        self._regions, self._groups, self._laws = (_dict(rows.get(kind)) for kind in ("regions", "groups", "laws"))
        self.refused = set[tuple[Region, int]]()

    def tile(self, region: Region, size: int) -> Tile | None:
        """The tile that won, if the search would time it; None where there is no hint."""
        if not self._regions or (region, size) in self.refused:
            return None
        found = _dict(_bucket(self._regions.get(structure(region)), size))
        tile, share = found.get("tile"), found.get("share")
        if not isinstance(tile, str) or not TILE.fullmatch(tile):
            return None
        (config,) = tiles(tile)
        if config not in legality.candidates(region, size):
            return None
        return Tile(config, share if _positive(share) else None)

    def group(self, regions: Sequence[Region], size: int) -> Expected | None:
        """How a group of these Regions fared."""
        if not self._groups:
            return None
        row = _bucket(self._groups.get(together(_all(regions))), size)
        if not isinstance(row, dict) or not isinstance(row.get("wins"), bool) or not _positive(row.get("ratio")):
            return None
        stands = row.get("stands")
        return Expected(row["wins"], row["ratio"], stands if isinstance(stands, bool) else None)

    def law(self, regions: Sequence[Region], others: Sequence[Region], size: int) -> float | None:
        """That a group costs more than the program of the other Regions, by the latter's time over its own; None where
        it stood, or nobody knows."""
        if not self._laws:
            return None
        row = _bucket(self._laws.get(together(_all(regions), _all(others))), size)
        ratio = row.get("ratio") if isinstance(row, dict) else None
        return ratio if isinstance(ratio, float) and _positive(ratio) else None


def hints(card: str, folder: Path | None = None) -> Hints:
    """The hints for a card, as torch names it; none if there is no file, or one that cannot be read or is of another
    card."""
    return Hints(_rows(card, folder or FOLDER))


@functools.cache
def digest(card: str) -> str:
    """Names what the hints for a card say."""
    return hashlib.sha256(json.dumps(_rows(card, FOLDER), sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _rows(card: str, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / file_of(card)).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the hints for %s cannot be read, tuning searches: %s", card, error)
        return {}
    if not isinstance(found, dict) or (found.get("schema"), found.get("card")) != (SCHEMA, card):
        log.warning("the hints for %s are of another card or kind, tuning searches", card)
        return {}
    return found


def _all(regions: Iterable[Region]) -> list[str]:
    return [structure(region) for region in regions]


def _bucket(row: Any, size: int) -> Any:
    """What a row says of a bucket."""
    return _dict(_dict(row).get("buckets")).get(str(size))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _positive(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
