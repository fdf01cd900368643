"""What in the store is ours, by names: only that is listed, counted, removed, or taken from an archive.

A store may be a folder that others use too: in the `objects` of `~/.cache`, say, lies what is not ours.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

ARTIFACTS = "artifacts"  # what torch.compiler.save_cache_artifacts gave
PROOFS = "proofs"  # that kernels are right on this card (proof.py); no archive holds them
NAMES = {
    "objects": r"coda_epilogue_[0-9A-Za-z]+-[0-9a-z]+",
    "epilogues": r"coda_(?:epilogue|elementwise)_[0-9A-Za-z]+\.py",
    ARTIFACTS: r"[0-9a-f]{16}\.bin",
    "tuning": r"(?:[0-9a-f]+-[0-9]+-[0-9a-f]+|(?:contest|bare)-[0-9a-f]+)\.json",
    PROOFS: r"[0-9a-f]{32}\.json",
}
"""Folder of the store to the names of its entries. In `objects` these are folders, elsewhere files. In this order the
folders are emptied: a record is small, and costs a second of timing or more."""
BELOW = r"(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*){2,4}"  # in `objects`; no dot first, so that none is ".."
_ARCHIVED = {kind: name + BELOW * (kind == "objects") for kind, name in NAMES.items() if kind != PROOFS}
PATHS = re.compile("|".join(f"{kind}/{name}" for kind, name in _ARCHIVED.items()))
"""The files that an archive may hold."""

_NAMES = {
    # An interrupted write leaves such a name with dots around (store.py).
    kind: re.compile(name if kind == "objects" else rf"{name}|\.{name}\.[a-z0-9_]+")
    for kind, name in NAMES.items()
}


def inside(store: Path, kind: str) -> Iterator[Path]:
    """Our entries of a folder of the store, by name, also links; none if the folder is a link, whose target is not
    ours."""
    folder = store / kind
    if folder.is_dir() and not folder.is_symlink():
        yield from (path for path in sorted(folder.iterdir()) if ours(kind, path))


def ours(kind: str, path: Path) -> bool:
    """Has the entry a name of ours, and is it what such a name stands for? (Or a link in its place.)"""
    if not _NAMES[kind].fullmatch(path.name):
        return False
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(mode) or (stat.S_ISDIR if kind == "objects" else stat.S_ISREG)(mode)
