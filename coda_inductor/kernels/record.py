"""What tuning found, on disk: one JSON record by region, bucket, device and versions, never changed once stored. (Only
what a hint spared is replaced, when it is searched after all.)"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from coda_inductor.codegen import target as targets
from coda_inductor.codegen.legality import BUCKETS, bucket, candidates, is_legal
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Region
from coda_inductor.kernels import store

ROOMS = ("codegen", "core", "kernels", "measure")


@functools.cache
def sources_digest() -> str:
    """Names the code that decides what a kernel is and how it is timed."""
    package = Path(__file__).parents[1]
    files = sorted(path for room in ROOMS for path in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def device_name() -> str:
    """The current GPU's name."""
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_available() else "none"


@functools.cache
def _name_of(device: int) -> str:
    """A GPU's name: asked once, since keys of the tuning of 16 layers ask thousands of times."""
    return str(torch.cuda.get_device_name(device))


def key(region: Region, size: int) -> str:
    """The record's file name."""
    parts = [region.text, str(size), device_name(), sources_digest(), *map(str, targets.versions().items())]
    return f"{region.digest}-{size}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"


def remember(
    directory: Path,
    region: Region,
    size: int,
    config: Config,
    ms: float | None,
    rows: list[dict[str, Any]],
    *,
    target: Target = SM_90A,
) -> Config:
    """Stores the configuration that won at bucket `size`, with all that was measured, and returns the one that stands:
    of processes that measure at once, the first's. Without `ms` it was hinted (tuning/shipped.py): no other was
    tried, and one that won a search replaces it."""
    found = {"config": config._asdict(), "ms": ms, "rows": rows, "region": region.digest, "bucket": size}
    found |= {"text": region.text}
    made = {**found, **({} if ms is not None else {"hinted": True}), **where()}
    standing = store.write_record(
        directory, key(region, size), made, lambda r: _stands(r, region, target, hints=ms is None)
    )
    return _config(standing, region, target) or config


def where() -> dict[str, Any]:
    """What a record was measured on and by."""
    return {"device": device_name(), "versions": targets.versions(), "sources": sources_digest()}


def remembered(
    directory: Path, region: Region, size: int, *, hints: bool = True, target: Target = SM_90A
) -> Config | None:
    """The configuration that won at bucket `size`, None if there is no readable record of a legal one, or without
    `hints` only of one that was hinted."""
    found = store.read_record(directory, key(region, size), lambda r: _stands(r, region, target, hints=hints))
    return _config(found, region, target) if found else None


def nearest(directory: Path, region: Region, size: int, *, target: Target = SM_90A) -> Config | None:
    """For a size at which nothing was measured, as of blocks of rows or of a dynamic dimension: the configuration that
    won at the nearest bucket, of two as near the larger, among those that a search would time at this size. None if
    nothing was measured."""
    here = bucket(size).bit_length()
    for other in sorted(BUCKETS, key=lambda b: (abs(b.bit_length() - here), -b)):
        found = remembered(directory, region, other, target=target)
        if found is not None and found in candidates(region, size, target):
            return found
    return None


def _stands(found: dict[str, Any], region: Region, target: Target, *, hints: bool) -> bool:
    """Is it the record of a legal configuration, and one that counts?"""
    return _config(found, region, target) is not None and (hints or found.get("hinted") is not True)


def _config(found: dict[str, Any], region: Region, target: Target) -> Config | None:
    """The configuration of a record, None if it is not a legal one."""
    if (config := Config.read(found.get("config"))) is None:
        return None
    try:
        return config if is_legal(region, config, target) else None
    except TypeError:  # numbers that are none
        return None
