"""`coda-inductor cache hints`: what this machine has measured, as the file of hints for its card (tuning/shipped.py).

For developers. Only records of the sources and versions that run now are taken, and none that a hint made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coda_inductor.codegen import target
from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.cache import existing
from coda_inductor.core.blocks import outputs
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import contracted
from coda_inductor.kernels import launch, proof, record, store
from coda_inductor.measure.products import beside_products
from coda_inductor.tuning import outcome, shipped

Facts = dict[str, Any]
MOST = 100.0  # of a ratio: a kernel may take no time that shows in a busy GPU


def hints(settings: Settings, out: str) -> Facts:
    """Writes the rows into `out`, beside those that it has of the same card. Raises Unsupported if there are none, or
    the file is another card's."""
    place = existing(settings.cache_dir)
    records = [*_records(place)] if place else []
    made = rows(records, settings.cache_dir)
    counts = {kind: len(made[kind]) for kind in ("regions", "groups", "laws")}
    if not counts["regions"]:
        said = f"nothing was measured on this machine ({record.device_name()}) by these sources and versions"
        raise Unsupported(said, hint="compile a model first, with CODA_INDUCTOR_HINTS=0")
    path, before = Path(out), _before(Path(out), made["card"])
    for kind in counts:
        for name, row in before.get(kind, {}).items():
            mine = made[kind].setdefault(name, {})
            made[kind][name] = {**row, **mine, "buckets": {**row.get("buckets", {}), **mine.get("buckets", {})}}
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    if not store.write(path.absolute(), text):
        raise Unsupported(f"cannot write {path}")
    return {"schema": 1, "action": "hints", "path": os.fspath(path), "card": made["card"], **counts}


def rows(records: list[Facts], cache_dir: str | None) -> Facts:
    """The file's content: of Regions the tiles, and how long their kernels take beside plain products; of groups and of
    laws how they fared."""
    regions = dict[str, Region]()
    made: Facts = {"schema": shipped.SCHEMA, "card": record.device_name(), "versions": target.versions()}
    made |= {kind: {} for kind in ("regions", "groups", "laws")}
    for found in records:
        if "config" in found:
            region = parse(found["text"])
            regions[region.digest] = region
            row = made["regions"].setdefault(shipped.structure(region), {"what": _what(region), "buckets": {}})
            config = Config(**found["config"])
            tile: Facts = {"tile": str(config)}
            if (share := share_of_products(region, config, found["bucket"], cache_dir)) is not None:
                tile["share"] = round(share, 4)
            row["buckets"][str(found["bucket"])] = tile
    contests = [f for f in records if "config" not in f and {*f["regions"], *f.get("against", ())} <= regions.keys()]
    laws = [f for f in contests if "against" in f]
    stood = dict[tuple[str, str], set[bool]]()
    for found in laws:
        mine, others = ([shipped.structure(regions[d]) for d in found[side]] for side in ("regions", "against"))
        fared = outcome.outcome_of(0, found)
        costs = fared.costs(found["margin"])
        stood.setdefault((shipped.together(mine), str(found["bucket"])), set()).add(not costs)
        if costs:
            ratio = {"ratio": round(fared.baseline.mean / fared.fused.mean, 4)}
            _add(made["laws"], shipped.together(mine, others), found, {"of": mine, "against": others}, ratio)
    for found in contests:
        if "against" not in found:
            mine = [shipped.structure(regions[d]) for d in found["regions"]]
            name, bucket, fared = shipped.together(mine), str(found["bucket"]), outcome.outcome_of(0, found)
            verdicts = {True} if fared.ratio >= outcome.CLOSE else stood.get((name, bucket), set())
            said: Facts = {"stands": verdicts == {True}} if len(verdicts) == 1 else {}
            said |= {"wins": not fared.loses, "ratio": round(min(fared.ratio, MOST), 4)}
            _add(made["groups"], name, found, {"of": mine}, said)
    for kind in ("groups", "laws"):
        made[kind] = {name: row for name, row in made[kind].items() if _drop_unsure(row)["buckets"]}
    return made


def share_of_products(region: Region, config: Config, m: int, cache_dir: str | None) -> float | None:
    """The kernel's time at `m` rows over that of plain products of the same matrices, by turns, on random inputs. None
    where it cannot be measured, as where memory is short."""
    try:
        kernel = launch.kernel(region.text, cache_dir)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.no_grad():
            inputs = proof.random_inputs(region, region.rows(m), device)
            outs = outputs(region, inputs)
            times = beside_products(lambda: kernel.run_in(config, inputs, outs), region, inputs)
    except (Unsupported, torch.OutOfMemoryError):
        return None
    return times[0] / times[1] if times else None


def _add(into: Facts, name: str, found: Facts, facts: Facts, new: Facts) -> None:
    """Adds how a group fared. Where several groups of the same Regions stand elsewhere, the least ratio counts; what
    they disagree on goes."""
    row, bucket = into.setdefault(name, {**facts, "buckets": {}}), str(found["bucket"])
    fared = new
    if (old := row["buckets"].get(bucket)) is not None:
        new = {k: v for k, v in new.items() if k in old and (k == "ratio" or old[k] == v)}
        new["ratio"] = min(new["ratio"], old["ratio"])
        if "wins" in fared and "wins" not in new:
            new = {"ratio": new["ratio"]}  # they disagree: no hint, whatever a third says
    row["buckets"][bucket] = new


def _drop_unsure(row: Facts) -> Facts:
    """Without the buckets in which groups of the same Regions disagree."""
    if "against" not in row:
        row["buckets"] = {bucket: fared for bucket, fared in row["buckets"].items() if "wins" in fared}
    return row


def _records(place: Path) -> Iterator[Facts]:
    """Those of Regions and of groups that were measured here, by what runs now."""
    for path in sorted((place / "tuning").glob("*.json")):
        found = store.read_record(place, path.stem)
        if found is None or outcome.hinted(found) or any(found.get(k) != v for k, v in record.where().items()):
            continue
        if "config" in found:
            region, size = parse(found["text"]), found["bucket"]
            if path.stem == record.key(region, size) and record.remembered(place, region, size):
                yield found
        elif (
            path.stem.startswith("contest-")
            and outcome.timed(found)
            and ("against" not in found or ("margin" in found and outcome.fully_timed(found)))
        ):
            yield found


def _before(path: Path, card: str) -> Facts:
    """The rows that the file has. Raises Unsupported if it is another card's."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or (found.get("schema"), found.get("card")) != (shipped.SCHEMA, card):
        raise Unsupported(f"{path} is no file of hints for {card}", hint=f"as {shipped.file_of(card)}")
    return found


def _what(region: Region) -> str:
    """A Region in a few words, for who reads the file."""
    left, right = region.dtypes
    said = [f"n={region.n} k={contracted(region.products[0])} {left}" + (f"x{right}" if left != right else "")]
    said += [f"{len(region.products)} products"] if len(region.products) > 1 else []
    said += ["summed"] if region.summed else []
    counts = {"load": region.operands, "op": region.lets, "store": region.stores, "sum": region.reductions}
    said += [f"{len(of)} {name}{'s' if len(of) > 1 else ''}" for name, of in counts.items() if of]
    return ", ".join(said)


def render(facts: Facts) -> str:
    """What was written."""
    return (
        f"{facts['regions']} Regions, {facts['groups']} groups and {facts['laws']} laws of {facts['card']}"
        f" written to {facts['path']}"
    )
