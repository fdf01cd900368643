"""Generated modules on disk, imported under the name of their content: CuTeDSL and quack read their source."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from coda_inductor.kernels import limit, store


class _Loader(SourceFileLoader):
    """Leaves no bytecode in the store, which holds nothing that `cache ls` does not know."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes nothing."""


def load_module(text: str, name: str, directory: Path) -> ModuleType:
    """The generated module, written to disk (CuTeDSL and quack read its source), imported under its content's name."""
    if name in sys.modules:
        return sys.modules[name]
    path = directory / "epilogues" / f"{name}.py"
    limit.using(directory, path.name)
    if not path.exists() or path.read_text() != text:
        store.write(path, text)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: quack finds the function through its module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
