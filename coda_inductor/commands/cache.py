"""`coda-inductor cache`: what is kept in the store (kernels/store.py), and its removal. Other actions are in caches/.

A kernel is one generated module with its compiled objects; a tuning record belongs to a Region, a measurement to a
few. Nothing outside the store is read or removed: links are never followed, what is not ours is left where it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_inductor.codegen.target import TARGETS
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.words import date, size, table
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings, default_cache
from coda_inductor.explain.report import plural
from coda_inductor.kernels import limit
from coda_inductor.kernels.entries import ARTIFACTS, PROOFS, inside
from coda_inductor.kernels.store import HINT, open_store

Facts = dict[str, Any]

EPILOGUE, ELEMENTWISE = "coda_epilogue_", "coda_elementwise_"  # of generated modules
SHORTEST = 4  # digits that name an entry
BUSY = ("busy_ms", "busy_baseline_ms")  # of a measurement's record, unless turns decided


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: `paths` are all that it consists of, `names` what it may be called by, `facts` what is known."""

    kind: str
    names: tuple[str, ...]
    paths: tuple[Path, ...]
    facts: Facts

    @property
    def bytes(self) -> int:
        return sum(_size(path) for path in self.paths)

    def row(self) -> Facts:
        """For --json."""
        changed = max(path.lstat().st_mtime for path in self.paths)
        return {"kind": self.kind, "digest": self.names[0], "bytes": self.bytes, "changed": changed, **self.facts}


def existing(cache_dir: str | None) -> Path | None:
    """The store, None if there is none yet. Raises Unsupported if it is not private."""
    return open_store(cache_dir) if Path(cache_dir or default_cache()).exists() else None


def possible(cache_dir: str | None) -> Path | None:
    """The store, None if there is none yet. Raises Unsupported if it is not private, or cannot be made."""
    if store := existing(cache_dir):
        return store
    path = Path(cache_dir or default_cache()).absolute()
    try:
        Path(tempfile.mkdtemp(dir=next(p for p in path.parents if p.exists()))).rmdir()
    except OSError as error:
        raise Unsupported(f"the kernel cache {path} cannot be made: {error.strerror}", hint=HINT) from error
    return None


def entries(store: Path) -> list[Entry]:
    """Everything of ours in the store: kernels, then records, by name."""
    modules: dict[str, list[Path]] = {}
    for path in inside(store, "epilogues"):
        modules.setdefault(path.stem if path.suffix == ".py" else path.name, []).append(path)
    for path in inside(store, "objects"):
        modules.setdefault(path.name.partition("-")[0], []).append(path)
    found = [_kernel(name, paths) for name, paths in modules.items()]
    found += [Entry(ARTIFACTS, (path.stem,), (path,), {}) for path in inside(store, ARTIFACTS)]
    found += [_proof(path) for path in inside(store, PROOFS)]
    return [*found, *(_record(path) for path in inside(store, "tuning"))]


def _kernel(name: str, paths: list[Path]) -> Entry:
    """A generated module and the folders of its compiled forms, or what an interrupted write left."""
    if name.startswith(ELEMENTWISE):
        return Entry("pass", (name.removeprefix(ELEMENTWISE),), tuple(paths), {})
    if not name.startswith(EPILOGUE):
        return Entry("leftover", (name,), tuple(paths), {})
    tiles = [p.name.partition("-")[2] for p in paths if p.suffix != ".py"]
    facts = {"tiles": tiles, "device": _target(paths)}
    return Entry("kernel", (name.removeprefix(EPILOGUE),), tuple(paths), facts)


def _target(paths: Sequence[Path]) -> str | None:
    """The name of the target whose device code a generated module imports; None without the module."""
    for path in paths:
        if path.suffix == ".py" and path.is_file() and not path.is_symlink():
            imported = re.search(r"^from coda_inductor\.codegen\.(device\w*) import", path.read_text(), re.MULTILINE)
            return next((row.name for row in TARGETS.values() if imported and row.device == imported[1]), None)
    return None


def _proof(path: Path) -> Entry:
    """That a kernel is right on a card; an unreadable one is a leftover."""
    try:
        found = json.loads(path.read_text()) if path.suffix == ".json" and not path.is_symlink() else None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        return Entry("leftover", (path.name,), (path,), {})
    facts = {"device": found.get("card"), "versions": found.get("versions"), "tile": found.get("config")}
    region = hashlib.sha256(str(found.get("text")).encode()).hexdigest()[:16]
    return Entry("proof", (region, path.stem), (path,), facts)


def _record(path: Path) -> Entry:
    """A tuning record or a measurement; an unreadable one is a leftover."""
    found: Any = None
    if path.suffix == ".json" and not path.is_symlink():
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = None
    if not isinstance(found, dict):
        return Entry("leftover", (path.name,), (path,), {})
    ours = {key: found.get(key) for key in ("device", "versions", "ms")}
    if path.name.startswith("contest-"):
        regions = [str(r) for r in found.get("regions") or ()]
        keys = ("baseline_ms", *BUSY, "against", "wins")
        facts = {**ours, "regions": regions, **{key: found.get(key) for key in keys}}
        return Entry("contest", (path.stem.removeprefix("contest-"), *regions), (path,), facts)
    facts = {**ours, "bucket": found.get("bucket"), "config": found.get("config"), "hinted": found.get("hinted", False)}
    return Entry("tuning", (path.stem.partition("-")[0],), (path,), facts)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    found = path.lstat()
    return sum(_size(p) for p in path.iterdir()) if stat.S_ISDIR(found.st_mode) else found.st_size


def _selected(store: Path, digests: Sequence[str]) -> list[Entry]:
    """The entries that `digests` name (none: all). Raises Unsupported for one that names nothing."""
    every = entries(store)
    for digest in digests:
        if len(digest) < SHORTEST:
            raise Unsupported(f"{digest!r} is too short", hint=f"give {SHORTEST} digits of a digest or more")
        if not any(name.startswith(digest) for e in every for name in e.names):
            raise Unsupported(f"nothing in {store} is called {digest!r}", hint="coda-inductor cache ls")
    return [e for e in every if not digests or any(n.startswith(d) for d in digests for n in e.names)]


def cache(settings: Settings, action: str, digests: Sequence[str], everything: bool) -> Facts:
    """Lists ("ls") or removes ("rm") what `digests` name, or `everything`. Raises Unsupported for a wrong request."""
    if action == "rm" and bool(digests) == everything:
        raise Unsupported("rm takes digests or --all, one of them", hint="coda-inductor cache ls")
    store = existing(settings.cache_dir)
    facts: Facts = {"schema": 1, "path": settings.cache_dir or default_cache(), "action": action}
    chosen = _selected(store, digests) if store else []
    facts["entries"] = [entry.row() for entry in chosen]
    if action == "rm":
        for entry in chosen:
            for path in entry.paths:
                _remove(path)
        if everything and store:
            try:
                limit.remove_leftovers(store)
            except OSError as error:
                raise Unsupported(f"cannot remove all of {store}: {error}") from error
    return facts


def trim(settings: Settings) -> Facts:
    """Removes what was used least recently until the limit holds; nothing that a running process uses, or that is new.
    Raises Unsupported without a limit, or if it cannot."""
    if not settings.cache_limit:
        raise Unsupported("there is no limit", hint="CODA_INDUCTOR_CACHE_LIMIT says how many GB")
    store = existing(settings.cache_dir)
    try:
        gone = limit.make_room(store, settings.cache_limit * limit.GB) if store else []
    except OSError as error:
        raise Unsupported(f"no room can be made in {store}: {error}") from error
    facts: Facts = {"schema": 1, "path": settings.cache_dir or default_cache(), "action": "trim"}
    return {
        **facts,
        "entries": [{"kind": "part", "digest": p.path.name, "bytes": p.bytes, "changed": p.used} for p in gone],
    }


def _remove(path: Path) -> None:
    """A file, a link (itself, not what it points to) or a folder; one that is gone already is no error."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)  # unlinks links inside
        else:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unsupported(f"cannot remove {path}: {error.strerror}") from error


def render(facts: Facts) -> str:
    """The entries as a table, and their sum."""
    rows = facts["entries"]
    lines = table(
        [
            (r["kind"], r["digest"], size(r["bytes"]), date(r["changed"]), r.get("device"), _what(r), _versions(r))
            for r in rows
        ]
    )
    words = {"kernel": "kernel", "pass": "elementwise pass", "tuning": "tuning record", "contest": "measurement"}
    words["proof"] = "proof"
    words[ARTIFACTS] = "file of torch's artifacts"
    words["part"] = "entry"
    words["leftover"] = "leftover file"
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in words}
    counts = ", ".join(plural(len(found), words[kind]) for kind, found in kinds.items() if found)
    total = f"{counts}, {size(sum(r['bytes'] for r in rows))}" if rows else "nothing"
    verb = "in" if facts["action"] == "ls" else "removed from"
    return "\n".join([*lines, f"{total} {verb} {facts['path']}"])


def _what(row: Facts) -> str:
    """The part of a row that its kind decides."""
    if row["kind"] == "kernel":
        return " ".join(row["tiles"]) or "not compiled"
    if row["kind"] == "pass":
        return "compiled and kept by Triton"
    if row["kind"] == "proof":
        return f"{row['tile']}: right on this card"
    if row["kind"] == ARTIFACTS:
        return "for torch.compiler.load_cache_artifacts"
    if row["kind"] == "tuning":
        ms = "as a hint said" if row["hinted"] else _ms(row["ms"])
        return f"up to {row['bucket']} rows: {_tile(row['config'])} {ms}"
    if row["kind"] == "contest":
        other = "without the law" if row["against"] else "Inductor"
        times = (
            f"fused {_ms(row['ms'])}, {other} {_ms(row['baseline_ms'])}{', as a hint said' * (row['wins'] is not None)}"
        )
        timed = [_ms(row[key]) for key in BUSY if row[key] is not None]
        once = [row[key] for key in BUSY] == [row["ms"], row["baseline_ms"]]  # long calls, or a slow host
        busy = f"; in a busy GPU {', '.join(timed)}" if timed and not once else ""
        return f"{'+'.join(r[:8] for r in row['regions'])}: {times}{busy}"
    return "not used for longest" if row["kind"] == "part" else "of an interrupted write, or unreadable"


def _tile(config: Any) -> str:
    """A record's configuration, as Config says itself."""
    try:
        return str(Config(**config))
    except TypeError:  # not a record of these sources
        return "?"


def _ms(value: Any) -> str:
    return f"{value:.3f} ms" if isinstance(value, int | float) else "? ms"


def _versions(row: Facts) -> str | None:
    found = row.get("versions")
    return " ".join(f"{name} {v}" for name, v in found.items()) if isinstance(found, dict) else None
