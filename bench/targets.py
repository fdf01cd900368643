"""Every case that stands for the program, compiled for a target on any machine: what spills, what is refused, and why.

    python bench/targets.py --target sm_100a [--cases CASE ...] [--all] [--out FILE]

One JSON line per case and tile (the tile tried first; `--all`: every one): "stack", bytes of spilled registers of a
thread; "registers"; "stages" as quack chose them and "model" as codegen/legality.py did, steps of the mainloop, stores
and loads; "shared", bytes of its buffers. Or "refused" with the reason, or "failed" with what the compiler said. A row
is "wrong" if it failed, if the model's stages are others, or if it needs more shared memory than a block has. The last
line counts them. Nothing is launched: no GPU is needed. Status 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]
from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.codegen.cases import CASES  # noqa: E402
from coda_inductor.codegen.target import TARGETS, Target  # noqa: E402
from coda_inductor.codegen.tiles import Config  # noqa: E402
from coda_inductor.core.errors import Unsupported  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402

Row = dict[str, Any]
N, K, TOKENS = 4096, 4096, 8192  # (a kernel is the same for all)
BY_NAME = {make.__name__: make for make in CASES}


def rows(row: Target, names: list[str], every: bool) -> Iterator[Row]:
    """What becomes of each case, in this process, which must be the target's."""
    watch = Watch(row)
    with tempfile.TemporaryDirectory() as store:
        for name in names:
            region = BY_NAME[name](N, K)
            found = {"target": row.name, "case": name}
            try:
                legality.check(region, row)
            except Unsupported as why:
                yield {**found, "refused": why.said}
                continue
            for config in legality.candidates(region, TOKENS, row)[: None if every else 1]:
                yield {**found, "tile": str(config), **watch.compiled(region, config, Path(store))}


class Watch:
    """Compiles, and sees what quack chooses meanwhile."""

    def __init__(self, row: Target) -> None:
        from quack.epilogue.frontend import _SM_BASE

        from coda_inductor.kernels import kernel

        self.row, self.kernel = row, kernel
        kernel.without_gpu()
        self.stages: list[int] = []
        self.shared = 0
        gemm: Any = _SM_BASE[row.capability[0]]
        stages, stored = gemm._compute_stages, gemm.make_epi_store_pipeline

        def chosen(cls: Any, *args: Any, **options: Any) -> Any:
            found = stages.__func__(cls, *args, **options)
            self.stages = list(found[-3:])
            return found

        def made(of: Any) -> Any:
            self.shared = of.shared_storage.size_in_bytes()
            return stored(of)

        gemm._compute_stages, gemm.make_epi_store_pipeline = classmethod(chosen), made

    def compiled(self, region: Region, config: Config, store: Path) -> Row:
        """The facts of one kernel."""
        from coda_inductor.kernels import cubin, library

        start = time.perf_counter()
        try:
            self.kernel.Compiled(region, config, store, target=self.row)
        except Unsupported as why:
            return {"failed": " ".join(why.said.split())[:500]}
        place = library.folder(region, config, store, target=self.row)
        (code,) = (path.read_bytes() for path in place.glob("*/*.o"))
        model = legality.stages(region, config, self.row)
        return {
            "stack": cubin.stack_bytes(code), "registers": cubin.registers(code), "stages": self.stages,
            "model": [model.ab, model.store if region.stores else self.stages[1], model.load],
            "shared": self.shared, "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip


def wrong(found: Row, row: Target) -> bool:
    """Did a compile fail, choose other stages than the model, or ask for more shared memory than a block has?"""
    more = found.get("shared", 0) > row.shared_memory - 1024  # quack keeps 1 KiB for barriers
    return "failed" in found or found.get("stages") != found.get("model") or more


def main() -> None:
    """Compiles in a process that has the target's environment, which the compiler reads when it is imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=tuple(TARGETS), required=True)
    parser.add_argument("--cases", nargs="*", choices=tuple(BY_NAME), default=list(BY_NAME), metavar="CASE")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    row = target.of_name(given.target)
    if given.here:
        for found in rows(row, given.cases, given.all):
            print(json.dumps(found), flush=True)
        return
    environment = {**os.environ, **dict(pair.split("=") for pair in row.environment), "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.Popen([sys.executable, *sys.argv, "--here"], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    seen: list[Row] = []
    for line in child.stdout:
        if line.startswith("{"):
            found = json.loads(line)
            seen.append({**found, "wrong": True} if wrong(found, row) else found)
            print(json.dumps(seen[-1]), flush=True)
    made_by = {"machine": "no GPU", "versions": target.versions(), "command": " ".join(["python", *sys.argv])}
    head = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    made_by["commit"] = head.stdout.strip() or "unknown"
    counts = {what: len({r["case"] for r in seen if what in r}) for what in ("stack", "refused", "failed")}
    total = {"target": row.name, "compiled": counts["stack"], **{k: counts[k] for k in ("refused", "failed")}}
    print(json.dumps({**total, "wrong": sum("wrong" in r for r in seen), **made_by}))
    if given.out:
        with Path(given.out).open("a") as file:
            file.writelines(json.dumps({**r, **made_by}) + "\n" for r in seen)
    sys.exit(child.wait() or any("wrong" in r for r in seen))


if __name__ == "__main__":
    main()
