"""The private directory on disk: generated modules, compiled kernels, tuning records. All are named by content.

What lies here is imported and executed, so the directory must be the user's own and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_inductor.core.errors import Unsupported, warn
from coda_inductor.core.settings import default_cache


def open_store(path: str | None) -> Path:
    """The directory `path`, or one in the user's cache: made with mode 0700 if missing, refused if not private."""
    store = Path(path or default_cache())
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.mkdir(mode=0o700, exist_ok=True)
        found = store.stat()
    except OSError as error:
        raise Unsupported(f"the kernel cache {store} cannot be made: {error.strerror}", hint=HINT) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Unsupported(f"the kernel cache {store} belongs to user {found.st_uid}, not to you", hint=HINT)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unsupported(
            f"others may write to the kernel cache {store} (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod 700 {store}",
        )
    if not os.access(store, os.W_OK | os.X_OK):
        raise Unsupported(f"the kernel cache {store} cannot be written", hint=HINT)
    return store


HINT = "set CODA_INDUCTOR_CACHE_DIR to a private directory"


def write(path: Path, content: str | bytes, *, replace: bool = True) -> bool:
    """All of it or nothing, also when several processes write the same file. False: one was there and was not to be
    replaced. Raises Unsupported if it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise Unsupported(f"cannot write into {path.parent}: {error.strerror}", hint=f"make room, or {HINT}") from error
    return True


Record = dict[str, Any]


def read_record(store: Path, key: str, good: Callable[[Record], bool] = bool) -> Record | None:
    """The record stored under `key`, None if there is none, or if it cannot be read or is not `good`. Reading it is use
    (limit.py)."""
    path = store / "tuning" / f"{key}.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not good(record):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return record


def write_record(store: Path, key: str, record: Record, good: Callable[[Record], bool] = bool) -> Record:
    """Stores `record` unless a good one is there, and returns the one that stands: what was once decided stays, in all
    processes. A record that cannot be written is used and not kept, with a warning."""
    path, text = store / "tuning" / f"{key}.json", json.dumps(record, indent=1, sort_keys=True) + "\n"
    if found := read_record(store, key, good):
        return found
    try:
        if not write(path, text, replace=path.exists()):  # one that exists is a broken one
            return read_record(store, key, good) or record
    except Unsupported as error:
        warn(f"a measurement is not kept, and will be taken again: {error}")
    return record
