"""coda-inductor: `torch.compile(model, backend="coda")`. Importing this is cheap: torch and the rest load when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_inductor import backend as backend
    from coda_inductor import explain as explain

__version__ = "0.1.0.dev0"

LAZY = {"backend": "coda_inductor.backend", "explain": "coda_inductor.explain"}
"""The modules that `coda_inductor.NAME` loads at first use."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(LAZY[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *LAZY])
