"""What a compiling process of prebuild.py runs. Imports the compiler, so nothing imports it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coda_inductor.codegen import kernel
from coda_inductor.codegen.legality import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import parse


def work() -> None:
    """Jobs from stdin as JSON; a line of a tab and the reason (empty: built) for each to stdout."""
    kernel.without_gpu()
    for directory, text, fields, swapped in json.load(sys.stdin):
        try:
            kernel.Compiled(parse(text), Config(*fields), Path(directory), swapped=swapped)
            reason = ""
        except Unsupported as refusal:
            reason = " ".join(str(refusal).split())
        print(f"\t{reason}", flush=True)
