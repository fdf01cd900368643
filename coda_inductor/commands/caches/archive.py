"""`coda-inductor cache export FILE` and `cache import FILE`: the store as one archive (zip).

A manifest says which machine and versions made it, and the SHA-256 of each file. Import verifies all of it before it
writes anything, keeps what the store has already, and refuses what does not verify. It cannot tell good code from bad:
kernels are machine code, and generated modules and torch's artifacts run when they are loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coda_inductor.commands.cache import existing
from coda_inductor.commands.words import TRUST, size
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain.report import plural
from coda_inductor.kernels import library, limit, record
from coda_inductor.kernels.entries import ARTIFACTS, NAMES, PATHS
from coda_inductor.kernels.store import open_store

log = logging.getLogger("coda_inductor.store")

Facts = dict[str, Any]

SCHEMA, MANIFEST = 1, "manifest.json"
MOST_MANIFEST = 64 << 20  # bytes
MOST_SHOWN = 200  # characters


def made_on() -> Facts:
    """What an archive must agree on with who imports it."""
    return {"schema": SCHEMA, "python": platform.python_version(), "machine": platform.machine(), **record.where()}


def export(settings: Settings, out: str) -> Facts:
    """Writes the archive. Raises Unsupported if there is nothing to write, or no room for it."""
    store, path = existing(settings.cache_dir), Path(out)
    found = [*_files(store)] if store else []
    if store is None or not found:
        raise Unsupported("the cache is empty", hint="coda-inductor cache ls")
    manifest = {**made_on(), "kernels_by": library.made_by(), "files": {}}
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in found:
                    content = (store / name).read_bytes()
                    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
                    archive.writestr(name, content)
                archive.writestr(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise Unsupported(f"cannot write {path}: {error.strerror}") from error
    facts = {"schema": 1, "action": "export", "path": out, "bytes": path.stat().st_size, **_counts(found)}
    return {**facts, **record.where()}


def _files(store: Path) -> Iterator[str]:
    """The files of ours in the store that an archive may hold; nothing behind a link."""
    for kind in NAMES:
        todo = [store / kind]
        while todo:
            path = todo.pop()
            if path.is_symlink() or not path.exists():
                continue
            if path.is_dir():
                todo += sorted(path.iterdir(), reverse=True)
            elif PATHS.fullmatch(name := path.relative_to(store).as_posix()):
                yield name


def _counts(names: list[str]) -> Facts:
    """How many of each kind."""
    kernels = {tuple(name.split("/")[:3]) for name in names if name.startswith("objects/")}
    return {"kernels": len(kernels)} | {k: sum(n.startswith(f"{k}/") for n in names) for k in ("tuning", ARTIFACTS)}


def bring_in(settings: Settings, archive: str, trusted: bool) -> Facts:
    """Puts what an archive holds into the store, and torch's artifacts into torch's caches. Raises Unsupported, and has
    done nothing, unless its user trusts it, it was made on such a machine by these versions, and all of it verifies."""
    print(TRUST, file=sys.stderr, flush=True)
    if not trusted and not _agreed(archive):
        raise Unsupported(f"{archive} was not imported", hint="--yes says that you trust who made it")
    try:
        with zipfile.ZipFile(archive) as opened:
            manifest = _manifest(opened, archive, settings)
            store = open_store(settings.cache_dir)
            (store / limit.RUNNING).mkdir(mode=0o700, exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=store / limit.RUNNING, prefix=".import-"))
            try:
                for name, said in manifest["files"].items():
                    _verified(opened, name, said, aside / name)
                usable = [n for n in manifest["files"] if _usable(n, manifest)]
                taken = {n: _into_torch(aside / n) for n in usable if n.startswith(f"{ARTIFACTS}/")}
                unread = [n for n, count in taken.items() if count is None]
                new = _moved([n for n in usable if n not in unread], aside, store)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise Unsupported(f"{archive} cannot be imported: {error}") from error
    facts: Facts = {"schema": 1, "action": "import", "path": archive, **_counts(new)}
    facts["left_out"] = len(manifest["files"]) - len(usable)
    facts |= {"torch_artifacts": sum(count or 0 for count in taken.values()), "unread": len(unread)}
    for name in taken.keys() - unread:
        os.utime(store / name)  # it was used, also if it was there (kernels/limit.py)
    return facts


def _agreed(archive: str) -> bool:
    """Asks, at a terminal. Elsewhere nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"Import {archive}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _manifest(archive: zipfile.ZipFile, path: str, settings: Settings) -> Facts:
    """The manifest, if the archive holds what it names and nothing else. Raises Unsupported."""
    infos = {info.filename: info for info in archive.infolist()}
    if MANIFEST not in infos or infos[MANIFEST].file_size > MOST_MANIFEST:
        raise Unsupported(f"{path} is no archive of `cache export`")
    try:
        found = json.loads(archive.read(MANIFEST))
        files = {str(name): (str(said["sha256"]), int(said["bytes"])) for name, said in found["files"].items()}
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError) as error:
        raise Unsupported(f"{path} is no archive of `cache export`") from error
    for what, mine in made_on().items():
        if found.get(what) != mine:
            other = _printable(found.get(what))
            raise Unsupported(f"{path} is of another {what}: {other}, here {mine}", hint="tune here instead")
    if len(infos) != len(archive.infolist()) or infos.keys() != files.keys() | {MANIFEST}:
        raise Unsupported(f"{path} does not hold what its manifest names")
    for name in files:
        mode = infos[name].external_attr >> 16
        if not PATHS.fullmatch(name) or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
            raise Unsupported(f"{path} holds {name!r}, which is no place in a cache")
    total = sum(count for _, count in files.values())
    if any(count < 0 for _, count in files.values()) or (0 < settings.cache_limit * limit.GB < total):
        hint = "CODA_INDUCTOR_CACHE_LIMIT says how many GB may be kept"
        raise Unsupported(f"{path} holds {size(total)}, more than the limit of {settings.cache_limit} GB", hint=hint)
    for name, (_, count) in files.items():
        if infos[name].file_size != count:
            raise Unsupported(f"{name} is not what the archive's manifest says")
    return {**found, "files": files}


def _printable(value: Any) -> str:
    """What somebody else wrote, in part, and so that a terminal shows it and does nothing else."""
    text = value[:MOST_SHOWN] if isinstance(value, str) else repr(value)
    return text if text.isprintable() and len(text) <= MOST_SHOWN else ascii(text[:MOST_SHOWN])


def _verified(archive: zipfile.ZipFile, name: str, said: tuple[str, int], path: Path) -> None:
    """Unpacks one file, not more of it than was said. Raises Unsupported if it is not what the manifest says."""
    digest, count = said
    with archive.open(name) as file:
        content = file.read(count + 1)
    if len(content) != count or hashlib.sha256(content).hexdigest() != digest:
        raise Unsupported(f"{name} is not what the archive's manifest says")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(content)


def _usable(name: str, manifest: Facts) -> bool:
    """Would it be found here? Kernels only if the same compiler lies at the same place, and with such a driver."""
    return not name.startswith("objects/") or manifest.get("kernels_by") == library.made_by()


def _moved(names: list[str], aside: Path, store: Path) -> list[str]:
    """Puts verified files where they belong, a kernel's form as a whole, and returns those that are new. What is there
    stays: records never change."""
    new = list[str]()
    for unit in dict.fromkeys("/".join(n.split("/")[:3]) if n.startswith("objects/") else n for n in names):
        there = store / unit
        there.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not there.exists() and not there.is_symlink():
            os.rename(aside / unit, there)
            new += [n for n in names if n == unit or n.startswith(f"{unit}/")]
    return new


def _into_torch(path: Path) -> int | None:
    """Gives torch its artifacts; how many it took, None if it cannot read them. 0 where this torch has no such
    function."""
    load = getattr(torch.compiler, "load_cache_artifacts", None)
    if load is None:
        return 0
    try:
        info = load(path.read_bytes())
    except Exception as error:  # what a file can do to torch's reader has no one class
        log.info("%s: %s: %s", path.name, type(error).__name__, error)
        return None
    return sum(map(len, info.artifacts.values())) if info is not None else None


def render(facts: Facts) -> str:
    """What was written or read."""
    counts = f"{plural(facts['kernels'], 'kernel')} and {plural(facts['tuning'], 'record')}"
    if facts["action"] == "export":
        told = f"and {plural(facts[ARTIFACTS], 'file')} of torch's artifacts, {size(facts['bytes'])} in {facts['path']}"
        return f"{counts}, {told}"
    lines = [f"{counts} are new; torch took {plural(facts['torch_artifacts'], 'artifact')}"]
    if facts["left_out"]:
        why = "their compiler or driver is another, or lies elsewhere"
        lines.append(f"{plural(facts['left_out'], 'file')} of kernels left out: {why}")
    if facts["unread"]:
        lines.append(
            f"{plural(facts['unread'], 'file')} of torch's artifacts left out: torch cannot read what is in it"
        )
    return "\n".join(lines)
