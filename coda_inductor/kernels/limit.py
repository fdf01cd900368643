"""How much the store may hold: what was used least recently goes first, and never what a running process uses.

A process notes what it uses in a file of its own, which it keeps locked until it ends. Whoever makes room reads these
files; one that is not locked is of a process that has ended. What is younger than an hour stays as well: it may be
being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("coda_inductor.store")

GB = 10**9
FRESH_S = 3600.0
RUNNING = "running"  # folder of the files that say what processes use
KINDS = ("objects", "epilogues", "torch", "tuning")
"""Folders of the store, in the order in which they are emptied: a record is small, and costs a second of timing or
more. In `torch` lies what torch.compiler.save_cache_artifacts gave."""

_noted: dict[Path, tuple[int, set[str]]] = {}  # by store: this process's file, open and locked, and what is in it
MOST_STORES = 64  # whose files one process keeps open; it uses one, but for tests
_looked: set[Path] = set()  # stores in which room was made


def using(directory: Path, *names: str) -> None:
    """Notes that this process uses these entries, by their names in `objects` or `epilogues`, and when. Call it before
    they are read. Where it cannot be noted they may go, and are made again."""
    with contextlib.suppress(OSError):
        if directory not in _noted:
            _noted[directory] = _opened(directory), set()
            for old in [*_noted][:-MOST_STORES]:
                os.close(_noted.pop(old)[0])
        file, said = _noted[directory]
        for name in names:
            if name not in said:
                os.write(file, f"{name}\n".encode())
                said.add(name)
                for kind in KINDS[:2]:
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(directory / kind / name)


def _opened(directory: Path) -> int:
    """This process's file, empty and locked. (A fork keeps it open, and so locked, as long as it runs.)"""
    folder = directory / RUNNING
    folder.mkdir(mode=0o700, exist_ok=True)
    file, path = tempfile.mkstemp(dir=folder, prefix=f".{os.getpid()}-")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(path, folder / Path(path).name.removeprefix("."))  # under its name it was always locked
    return file


@dataclass(frozen=True, slots=True)
class Part:
    """Something that goes as a whole, and when it was last used."""

    path: Path
    bytes: int
    used: float


def keep_within(directory: Path, limit_gb: int) -> None:
    """Makes room once in a process, if there is a limit (0: none)."""
    if limit_gb and directory not in _looked:
        _looked.add(directory)
        try:
            make_room(directory, limit_gb * GB)
        except OSError as error:
            log.info("no room was made in %s: %s", directory, error)


def make_room(directory: Path, limit: int) -> list[Part]:
    """Removes what was used least recently until the rest holds `limit` bytes at most, or nothing more may go. What was
    removed."""
    folder, removed = directory / RUNNING, list[Part]()
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / ".making_room").open("w") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process is at it, or locks are not to be had here
            return []
        in_use, now = used(directory), time.time()
        found = [part for kind in KINDS for part in sorted(parts(directory / kind), key=lambda part: part.used)]
        total = sum(part.bytes for part in found)
        for part in found:
            if total <= limit:
                break
            if part.path.name not in in_use and now - part.used > FRESH_S and _remove(part.path, folder):
                removed.append(part)
                total -= part.bytes
    if removed:
        log.info("%d entries of %s went, %.2f GB are left", len(removed), directory, total / GB)
    return removed


def used(directory: Path) -> set[str]:
    """What running processes use. Their files go with them."""
    found = set[str]()
    for path in sorted((directory / RUNNING).glob("[0-9]*")):
        with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it runs, or locks are not to be had here
                found.update(file.read().split())
            else:
                path.unlink(missing_ok=True)
    return found


def parts(folder: Path) -> Iterator[Part]:
    """What lies in a folder of the store; links, and what is behind one, are left alone."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISLNK(found.st_mode):
                yield Part(path, _bytes(path), found.st_mtime)


def _bytes(path: Path) -> int:
    found = path.lstat()
    return sum(map(_bytes, path.iterdir())) if stat.S_ISDIR(found.st_mode) else found.st_size


def _remove(path: Path, aside: Path) -> bool:
    """All of it at once for whoever looks: it is moved `aside` before. False if it cannot be."""
    gone = Path(tempfile.mkdtemp(dir=aside, prefix=".gone-"))
    try:
        path.rename(gone / path.name)
    except OSError:
        return False
    finally:
        shutil.rmtree(gone, ignore_errors=True)
    return True
