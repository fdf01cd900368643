"""What a compiling process of prebuild.py runs. Imports the compiler, so nothing imports it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from coda_inductor.codegen import kernel
from coda_inductor.codegen.legality import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import parse


def work() -> None:
    """Jobs from stdin as JSON; for each, a line "<tab>seconds<tab>reason" (no reason: built) to stdout."""
    kernel.without_gpu()
    for directory, text, fields, swapped in json.load(sys.stdin):
        start = time.perf_counter()
        try:
            kernel.Compiled(parse(text), Config(*fields), Path(directory), swapped=swapped)
            reason = ""
        except Unsupported as refusal:
            reason = " ".join(str(refusal).split())
        print(f"\t{time.perf_counter() - start:.3f}\t{reason}", flush=True)
