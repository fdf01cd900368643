"""Graphs and machines without kernels: all is left to Inductor, and one warning says why.

Under CODA_INDUCTOR_STRICT=1 the same raises, with what, where and what to do. A GPU is pretended where one is needed.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from compiling import HERE, REFERENCE, close, half, left_to_inductor, raised, run, streams
from pretended_machine import pretended as pretended

from coda_inductor.codegen import target
from coda_inductor.core.errors import CodaWarning
from coda_inductor.inductor import joint_pass
from coda_inductor.kernels import launch

BF16 = torch.bfloat16
KNOWN = "sm_90 only (on request for sm_100, sm_103, sm_120)"
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        (None, "no NVIDIA GPU (CODA"),
        ((8, 0), f"kernels are generated for {KNOWN}, found sm_80 ("),
        ((12, 1), f"kernels are generated for {KNOWN}, found sm_121 ("),
        ((10, 0), "kernels for sm_100a are compiled, not yet run on such a card: they are used if asked for ("),
    ],
)
def test_machine_without_kernels(
    pretended: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, said: str
) -> None:
    monkeypatch.setattr(target, "capability", lambda device=None: capability)
    left_to_inductor(f"every graph is left to Inductor: {said}")
    raised(monkeypatch, "Unsupported: ", said)


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("nvidia-cutlass-dsl", None, "nvidia-cutlass-dsl is not installed (pip install"),
        ("quack-kernels", None, "quack-kernels is not installed (pip install"),
        ("nvidia-cutlass-dsl", "4.6.0", "nvidia-cutlass-dsl 4.6.0 was not tested (pip install"),
        ("quack-kernels", "0.7.1", 'quack-kernels 0.7.1 was not tested (pip install "quack-kernels>=0.6.5,<0.7")'),
    ],
)
def test_missing_or_untested_library(
    pretended: None, monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, said: str
) -> None:
    from importlib import metadata

    def found(name: str) -> str:
        if name == package and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == package and version else {"quack-kernels": "0.6.5"}.get(name, "4.8.1")

    monkeypatch.setattr(target, "version_of", found)
    monkeypatch.setattr(target, "installed", REAL_INSTALLED)
    left_to_inductor(f"every graph is left to Inductor: {said}")
    raised(monkeypatch, "Unsupported: ", said)


REAL_INSTALLED = target.installed


def test_a_library_that_is_installed_and_cannot_be_found(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "MODULES", ("quakc",))
    left_to_inductor("the module quakc cannot be found (pip install quakc)")


def test_graph_on_another_device(monkeypatch: pytest.MonkeyPatch, pretended: None) -> None:
    """A machine with a GPU, a graph on its CPU."""
    monkeypatch.setattr(joint_pass, "DEVICE", "cuda")
    left_to_inductor("no kernels are generated for cpu (CODA_INDUCTOR_TARGET=reference")
    raised(monkeypatch, HERE, "no kernels are generated for cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_without_kernels(pretended: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    ran = left_to_inductor(f"its products are of {name} (kernels multiply bfloat16", dtype)
    assert HERE in ran[0]
    raised(monkeypatch, HERE, f"its products are of {name}", "autocast", dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 64, 255])
def test_few_tokens(pretended: None, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """One row, and sizes under a tile."""
    left_to_inductor("fewer than 256 (", tokens=tokens)
    raised(monkeypatch, HERE, f"{tokens} tokens", tokens=tokens)


@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("dynamic", [False, True])
def test_small_and_empty_batches_on_the_reference(tokens: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(), streams(tokens=tokens)
    ran = run(model, *x, options=REFERENCE, dynamic=dynamic)
    close(ran.output, model(*x).detach())
    assert ran == []


def test_a_dynamic_batch_that_shrinks_to_nothing(pretended: None) -> None:
    """A graph with kernels meets few rows; for 1 and 0 Dynamo makes graphs of their own, which are too small."""
    torch._dynamo.reset()
    model = half(BF16)
    compiled = torch.compile(model, backend="coda")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CodaWarning)
        for tokens in (512, 300, 2, 37, 1, 0, 1024):
            x = streams(BF16, tokens)
            for t in x:
                torch._dynamo.maybe_mark_dynamic(t, 0)
            close(compiled(*x), model(*x))
    said = [str(w.message) for w in caught if w.category is CodaWarning]
    assert len(said) == 1 and "fewer than 256" in said[0]
    assert set(launch.LAUNCHES.values()) == {5}  # each Region at each of them
