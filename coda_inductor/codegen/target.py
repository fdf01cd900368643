"""Is there a machine and a compiler for generated kernels here? Looks at versions, imports nothing."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import torch

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.versions import numbers

# Tested ranges: lowest, first that was not tested. quack's epilogue interface changed with every minor release so far.
TESTED = {"nvidia-cutlass-dsl": ((4, 8), (4, 9)), "quack-kernels": ((0, 6, 5), (0, 7))}
MODULES = ("cutlass", "quack", "triton")


def capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """The compute capability of `device` (None: the current one), None without a GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def available(capability: tuple[int, int] | None) -> None:
    """Raises Unsupported unless a device of compute `capability` can run generated kernels (None: no GPU)."""
    if capability is None:
        raise Unsupported("no NVIDIA GPU", hint="CODA_INDUCTOR_TARGET=reference runs regions on any device")
    if capability != (9, 0):
        raise Unsupported(f"kernels are generated for sm_90 only, found sm_{capability[0]}{capability[1]}")
    for package, (lowest, beyond) in TESTED.items():
        found = installed(package)
        span = f">={_text(lowest)},<{_text(beyond)}"
        if found is None:
            raise Unsupported(f"{package} is not installed", hint=f'pip install "{package}{span}"')
        if not lowest <= numbers(found) < beyond:
            raise Unsupported(f"{package} {found} was not tested", hint=f'pip install "{package}{span}"')
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            raise Unsupported(f"the module {module} cannot be found", hint=f"pip install {module}")


def installed(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


version_of = functools.cache(version)
"""Read once (3 ms; the keys of the tuning of 16 layers ask 2000 times): what is imported stays. One that is missing
may yet be installed."""


def versions() -> dict[str, str]:
    """What a measurement depends on besides the device."""
    return {package: installed(package) or "missing" for package in (*TESTED, "torch")}


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
