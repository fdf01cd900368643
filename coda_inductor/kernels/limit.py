"""How much the store may hold: what was used least recently goes first, and never what a running process uses.

A process notes what it uses in a file of its own, which it keeps locked until it ends. Whoever makes room reads these
files; one that is not locked is of a process that has ended. What is younger than an hour stays as well: it may be
being written. What has no name of ours (entries.py) is not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coda_inductor.kernels.entries import NAMES, inside

log = logging.getLogger("coda_inductor.store")

GB = 10**9
FRESH_S = 3600.0
RUNNING = "running"  # folder of the files that say what processes use
TURN = ".making_room"
NOTED = re.compile(r"\d+-[a-z0-9_]{8}")  # a process's file, by its id
LEFT = re.compile(r"\.(import|gone|\d+)-[a-z0-9_]{8}")

_noted: dict[Path, tuple[int | None, set[str]]] = {}
"""By store: this process's file, open and locked, and what is in it. None where there are no locks."""
MOST_STORES = 64  # whose files one process keeps open; it uses one, but for tests
_looked: set[Path] = set()  # stores in which room was made


def using(directory: Path, *names: str) -> None:
    """Notes that this process uses these entries, by their names in `objects` or `epilogues`, and when. Call it before
    they are read. Where it cannot be noted they may go, and are made again."""
    with contextlib.suppress(OSError):
        if directory not in _noted:
            _noted[directory] = _opened(directory), set()
            for old in [*_noted][:-MOST_STORES]:
                if (before := _noted.pop(old)[0]) is not None:
                    os.close(before)
        file, said = _noted[directory]
        for name in names:
            if name not in said:
                if file is not None:
                    os.write(file, f"{name}\n".encode())
                said.add(name)
                for kind in ("objects", "epilogues"):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(directory / kind / name)


def _opened(directory: Path) -> int | None:
    """This process's file, empty and locked; None where there are no locks. (A fork keeps it open, and so locked, as
    long as it runs.)"""
    folder = directory / RUNNING
    folder.mkdir(mode=0o700, exist_ok=True)
    file, path = tempfile.mkstemp(dir=folder, prefix=f".{os.getpid()}-")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, folder / Path(path).name.removeprefix("."))  # under its name it was always locked
    except OSError as error:
        os.close(file)
        os.unlink(path)
        log.info("what this process uses of %s cannot be noted: %s", directory, error)
        return None
    return file


@dataclass(frozen=True, slots=True)
class Part:
    """Something that goes as a whole, and when it was last used."""

    path: Path
    bytes: int
    used: float


def keep_within(directory: Path, limit_gb: int) -> None:
    """Makes room once in a process, if there is a limit (0: none). What went is said."""
    if limit_gb and directory not in _looked:
        _looked.add(directory)
        try:
            removed = make_room(directory, limit_gb * GB)
        except OSError as error:
            log.info("no room was made in %s: %s", directory, error)
            return
        if removed:
            said = "%s held more than %d GB (CODA_INDUCTOR_CACHE_LIMIT): entries that were removed from it: %d, %.2f GB"
            log.warning(said, directory, limit_gb, len(removed), sum(part.bytes for part in removed) / GB)


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[bool]:
    """Is it this process that removes something within? Not while another does, or where there are no locks."""
    folder = directory / RUNNING
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / TURN).open("w") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def make_room(directory: Path, limit: int) -> list[Part]:
    """Removes what was used least recently until the rest holds `limit` bytes at most, or nothing more may go, and what
    a crash left. The entries that were removed. Raises OSError."""
    folder, removed = directory / RUNNING, list[Part]()
    with _turn(directory) as ours:
        if not ours:
            return []
        _remove_leftovers(folder)
        in_use, now = used(directory), time.time()
        found = [part for kind in NAMES for part in sorted(parts(directory, kind), key=lambda part: part.used)]
        total = sum(part.bytes for part in found)
        for part in found:
            if total <= limit:
                break
            if part.path.name not in in_use and now - part.used > FRESH_S and _remove(part.path, folder):
                removed.append(part)
                total -= part.bytes
    return removed


def remove_leftovers(directory: Path) -> None:
    """Removes what a crash left where processes note what they use. Raises OSError."""
    if (directory / RUNNING).is_dir():
        with _turn(directory) as ours:
            if ours:
                _remove_leftovers(directory / RUNNING)


def _remove_leftovers(folder: Path) -> None:
    """An archive that was being unpacked, an entry that was being removed, the file of a process that was about to lock
    it."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if LEFT.fullmatch(path.name) and time.time() - _used(path) > FRESH_S:
                if stat.S_ISDIR(path.lstat().st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def used(directory: Path) -> set[str]:
    """What running processes use. Their files go with them."""
    found = set[str]()
    for path in sorted((directory / RUNNING).iterdir()):
        if not NOTED.fullmatch(path.name):
            continue
        with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it runs, or locks are not to be had here
                found.update(file.read().split())
            else:
                path.unlink(missing_ok=True)
    return found


def parts(directory: Path, kind: str) -> Iterator[Part]:
    """Our entries in a folder of the store; links, and what is behind one, are left alone."""
    for path in inside(directory, kind):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink():
                yield Part(path, _bytes(path), _used(path))


def _used(path: Path) -> float:
    """When it was used. What says that it will be, by a clock that was ahead, is used now, and from now on older."""
    found = path.lstat().st_mtime
    if found <= (now := time.time()):
        return found
    with contextlib.suppress(OSError):
        os.utime(path, (now, now), follow_symlinks=False)
    return now


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
