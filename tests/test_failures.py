"""Everything that may go wrong, provoked: the result is right, one warning says what and why, nothing is lost.

Under CODA_INDUCTOR_STRICT=1 the same raises, with what, where and what to do. A GPU is pretended where one is needed.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import HERE, REFERENCE, Interpreted, close, half, left_to_inductor, pretend, raised, run, streams
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from coda_inductor.codegen import target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core import errors
from coda_inductor.core.errors import BrokenInvariant, CodaWarning, Unsupported, warn
from coda_inductor.core.region import Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import joint, joint_pass, notes, settle
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.kernels import launch, store
from coda_inductor.measure import timing
from coda_inductor.ops import lowering
from coda_inductor.patterns.lift import lift
from coda_inductor.plan import search

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        (None, "no NVIDIA GPU (CODA"),
        ((8, 0), "kernels are generated for sm_90 only, found sm_80 ("),
        ((10, 0), "kernels are generated for sm_90 only, found sm_100 ("),
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


STAGES: list[tuple[str, Any, str]] = [
    ("lift", settle, "lift"),
    ("plan", settle, "plan"),
    ("build", search, "build"),
    ("emit", joint, "emit"),
    ("report", joint, "_absorb"),
]


@pytest.mark.parametrize(("stage", "module", "name"), STAGES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("error", [RuntimeError("provoked"), BrokenInvariant("provoked"), RecursionError("provoked")])
def test_exception_inside_the_pass(
    monkeypatch: pytest.MonkeyPatch, stage: str, module: Any, name: str, error: Exception
) -> None:
    """Before anything, at every stage, and after the graph has been changed."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setattr(module, name, fail)
    ran = left_to_inductor("provoked (a bug of ours, please report it; CODA_INDUCTOR=0", torch.float64)
    assert HERE in ran[0] and (isinstance(error, BrokenInvariant) or type(error).__name__ in ran[0])
    raised(monkeypatch, HERE, "BrokenInvariant: ", "provoked", "CODA_INDUCTOR=0", dtype=torch.float64)


@pytest.mark.parametrize("after", ["region", "supply", "lint"])
def test_exception_in_the_middle_of_writing_restores_the_graph(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Inductor gets what it would have got: the same text, names included."""
    graphs: list[str] = []

    class Watched(JointPass):
        def __call__(self, graph: fx.Graph) -> None:
            module = notes.owner(graph)
            graphs.append(str(module.graph))
            super().__call__(graph)
            graphs.append(str(module.graph))
            assert all("val" in n.meta for n in module.graph.nodes if n.op == "call_function")

    import coda_inductor.inductor.compile
    from coda_inductor.write import emit

    def fail_after(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            method(*args, **kwargs)
            raise RuntimeError("provoked")

        return call

    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setattr(coda_inductor.inductor.compile, "JointPass", Watched)
    owner = fx.Graph if after == "lint" else emit.Emission
    with monkeypatch.context() as patch:
        patch.setattr(owner, after, fail_after(getattr(owner, after)))
        model, x = half(), streams()
        if after == "lint":  # Dynamo lints its graphs, too

            def lint(graph: fx.Graph) -> None:
                if any("coda" in str(n.target) for n in graph.nodes):
                    raise RuntimeError("provoked")

            patch.setattr(fx.Graph, "lint", lint)
        ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and "provoked" in ran[0]
    assert len(graphs) == 2 and graphs[0] == graphs[1] and "coda" not in graphs[1]


@pytest.mark.parametrize("where", ["lowering", "writing"])
def test_exception_in_what_inductor_makes_of_a_region(
    pretended: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After the pass, the graph is compiled again without it."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("provoked")

    if where == "lowering":
        monkeypatch.setattr(lowering, "_layouts", fail)
    else:
        monkeypatch.setattr(lowering.RegionKernel, "codegen", fail)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert (
        len(ran) == 1
        and "a graph is left to Inductor: " in ran[0]
        and "provoked" in ran[0]
        and "CODA_INDUCTOR=0" in ran[0]
    )
    assert torch.equal(ran.output, run(model, *x, backend="inductor").output)
    raised_text = raised_by_inductor(monkeypatch)
    assert "provoked" in raised_text


def raised_by_inductor(monkeypatch: pytest.MonkeyPatch) -> str:
    """Under STRICT Inductor's own error, which names the operation."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    with pytest.raises(Exception, match="provoked") as caught:
        run(half(BF16), *streams(BF16))
    return str(caught.value)


def test_a_graph_that_inductor_cannot_compile_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error reaches the user once, and nothing is blamed on us."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Inductor's own")

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", fail)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Exception, match="Inductor's own"):
        warnings.simplefilter("always", CodaWarning)
        run(half(), *streams(), options=REFERENCE)
    assert not [w for w in caught if w.category is CodaWarning]


def test_a_guard_of_ours_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    counts = iter(range(100))
    monkeypatch.setattr(joint, "_guards", lambda graph: next(counts))
    left_to_inductor("the rewrite added a guard", torch.float64)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = half(), half()

    def forward(self, a: Tensor, r: Tensor) -> Tensor:
        h = self.first(a, r)
        torch._dynamo.graph_break()
        return self.second(a, h)  # type: ignore[no-any-return]


def test_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is rewritten; one that fails does not take the other with it."""
    model, x = Breaks(), streams()
    wanted = model(*x).detach()
    ran = run(model, *x, options=REFERENCE)
    close(ran.output, wanted)
    assert ran == [] and ran.regions == [3, 3]

    calls: list[object] = []
    whole = lift

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("provoked")
        return whole(*args, **kwargs)

    monkeypatch.setattr(settle, "lift", fails_once)
    ran = run(model, *x, options=REFERENCE)
    close(ran.output, wanted)
    assert len(ran) == 1 and ran.regions == [3]


def test_two_failures_are_two_warnings_and_one_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["provoked at 0x7f3a", "provoked at 0x11", "another", "another"])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(next(texts))

    monkeypatch.setattr(settle, "lift", fail)
    ran = run(Breaks(), *streams(), options=REFERENCE)
    assert len(ran) == 1
    ran = run(Breaks(), *streams(), options=REFERENCE)
    assert len(ran) == 1 and "another" in ran[0]


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        ("products of f16", "products of f32", 2),
        ("no bf16 on sm_90a", "no bf16 on sm_80a", 2),
        ("in2 is dead", "in3 is dead", 2),
        ("model.py:41: 128 tokens", "model.py:7: 64 tokens", 1),
        ("a.py:1: region 00c0ffee00c0ffee at 0x7f3a", "a.py:1: region 0badcafe0badcafe at 0x11", 1),
    ],
)
def test_only_numbers_make_no_new_warning(one: str, other: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(one)
        warn(other)
    assert len(caught) == kinds


def test_warnings_as_errors_stop_the_compile() -> None:
    """As Python's -W error promises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodaWarning)
        with pytest.raises(CodaWarning, match="coda_inductor: told"):
            warn("told")


def test_tensor_subclass_inputs() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, (a, r) = half(), streams()
    x = TwoTensor(a, a + 1), TwoTensor(r, r - 1)
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, options=REFERENCE)
    assert isinstance(ran.output, TwoTensor) and ran == []
    close(ran.output.a, wanted.a)
    close(ran.output.b, wanted.b)
    assert ran.regions and ran.regions[0] >= 3


VIEWS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("transposed", lambda x: x.t().contiguous().t()),
    ("every other row", lambda x: torch.stack((x, x), 1).flatten(0, 1)[::2]),
    ("every other column", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    ("one column in", lambda x: torch.nn.functional.pad(x, (1, 0))[:, 1:]),
    ("one row for all", lambda x: x[:1].expand_as(x)),
]


@pytest.mark.parametrize("view", [v for _, v in VIEWS], ids=[name for name, _ in VIEWS])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_strides_of_inputs(
    view: Callable[[Tensor], Tensor], kernels: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dtype = BF16 if kernels else torch.float64
    if kernels:
        pretend(monkeypatch, tmp_path)
        monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, (a, r) = half(dtype), streams(dtype)
    x = view(a), view(r)
    ran = run(model, *x, options={} if kernels else REFERENCE)
    close(ran.output, model(*x).detach())
    (report,) = ran.reports  # what lies otherwise than in rows is left, with a reason, or copied, with a warning
    assert report.sites and (len(report.sites) == 3 or any("laid out" in r.reason for r in report.refused))
    assert all("an input was copied" in text for text in ran) and len(ran) <= 1


@pytest.mark.parametrize("view", [v for _, v in VIEWS], ids=[name for name, _ in VIEWS])
def test_strides_of_weights(view: Callable[[Tensor], Tensor], pretended: None) -> None:
    model, x = half(BF16), streams(BF16)
    for linear in (model.o, model.gate, model.up, model.down):
        linear.weight = nn.Parameter(view(linear.weight.detach()), requires_grad=False)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) <= 1 and all("copied" in text or "two matrices" in text for text in ran)


def test_one_weight_twice(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are the same: there is no distance between them to encode."""
    model, x = half(BF16), streams(BF16)
    model.up = model.gate
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) <= 1


# ---- the compiler, the clock, memory


def build_fails(region: Region, config: Config, directory: Path, **_: Any) -> Any:
    raise Unsupported(f"no kernel for {config}: RuntimeError: nvvm says no")


class Wrong(Interpreted):
    """A kernel whose numbers are off by a hundredth."""

    def __call__(self, inputs: Any, outs: Any) -> None:
        super().__call__(inputs, outs)
        for out in outs:
            if out is not None:
                out.mul_(1.01)


class OutOfMemory(Interpreted):
    def __call__(self, inputs: Any, outs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Illegal(Interpreted):
    def __call__(self, inputs: Any, outs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Nan(Interpreted):
    """A kernel that writes nothing."""

    def __call__(self, inputs: Any, outs: Any) -> None:
        return


@pytest.mark.parametrize(
    ("build", "tune_", "said"),
    [
        (build_fails, "quick", "nvvm says no"),
        (build_fails, "off", "nvvm says no"),
        (Wrong, "quick", "is right: relative error"),
        (Nan, "quick", "is right: relative error nan"),
        (OutOfMemory, "quick", "out of memory while it was measured (compile before memory is filled"),
    ],
)
def test_kernel_that_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Any, tune_: str, said: str
) -> None:
    """It does not compile, is wrong, or does not fit: the Regions are left to Inductor, with one warning for all."""
    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune_)
    ran = left_to_inductor(said)
    assert ran[0].startswith("coda_inductor: a region is left to Inductor: ") and HERE in ran[0]
    assert not list((tmp_path / "kernels").rglob("*.json"))  # a failure is not remembered
    raised(monkeypatch, HERE, said, "Unsupported: ")


def test_one_kernel_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(region: Region, config: Config, directory: Path, **how: Any) -> Any:
        return (build_fails if len(region.products) == 2 else Interpreted)(region, config, directory)

    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and ran.regions and ran.regions[0] > 0
    assert all(len(site.region.products) == 1 for site in ran.reports[0].sites)


def test_error_while_tuning_that_nobody_expects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An illegal address, say: nothing that runs after it can be believed, so the whole graph is left."""

    pretend(monkeypatch, tmp_path, Illegal)
    left_to_inductor("RuntimeError: CUDA error: an illegal memory access")


def test_a_loser_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(timing, "compared", lambda calls, rounds, **how: [timing.Times(1.0, 1.0)] * len(calls))
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions == [0]


# ---- the store


@pytest.mark.parametrize("broken", ["", "[]", '{"ms": "fast"}', '{"ms": 1.0, "regions": []}', "\0"])
def test_corrupted_records_are_taken_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(BF16), streams(BF16)
    assert run(model, *x).regions == [3]
    records = sorted((tmp_path / "kernels" / "tuning").iterdir())
    good = {path: path.read_text() for path in records}
    assert len(records) >= 4
    for path in records:
        path.write_text(broken)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions == [3]
    assert {path: path.read_text() for path in sorted((tmp_path / "kernels" / "tuning").iterdir())} == good


def test_what_was_decided_stays(tmp_path: Path) -> None:
    first = store.write_record(tmp_path, "k", {"ms": 1.0})
    assert store.write_record(tmp_path, "k", {"ms": 2.0}) == first == store.read_record(tmp_path, "k")


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_while_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The measurement is used, and not kept."""
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "link", full)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran.regions == [3] and len(ran) == 1
    assert "a measurement is not kept" in ran[0] and "No space left on device (make room, or set CODA" in ran[0]
    assert not list((tmp_path / "kernels" / "tuning").iterdir())


def test_full_disk_while_building(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel needs its module on disk, so the Regions are left."""

    def build(region: Region, config: Config, directory: Path, **_: Any) -> Any:
        store.write(directory / "epilogues" / "x.py", "x = 1")

    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setattr(os, "replace", full)
    left_to_inductor("No space left on device (make room")
    raised(monkeypatch, HERE, "No space left on device")

    def direct(region: Region, config: Config, directory: Path, **_: Any) -> Any:
        full()  # what a library does in our folder

    pretend(monkeypatch, tmp_path, direct)
    monkeypatch.delenv("CODA_INDUCTOR_STRICT")
    left_to_inductor("No space left on device")


def make_foreign(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)


def make_open(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_read_only(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    path.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root


def make_impossible(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.parent.joinpath("file").write_text("")
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(path.parent / "file" / "kernels"))


def make_a_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_foreign, "not to you (set CODA_INDUCTOR_CACHE_DIR"),
        (make_open, "others may write to the kernel cache"),
        (make_read_only, "cannot be written"),
        (make_impossible, "cannot be made: File exists (set CODA"),
        (make_a_file, "cannot be made: File exists (set CODA"),
    ],
)
def test_directory_that_is_not_private_or_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any, said: str
) -> None:
    pretend(monkeypatch, tmp_path)
    make(monkeypatch, tmp_path / "kernels")
    left_to_inductor(said)
    raised(monkeypatch, said, "kernels")


# ---- at launch: graphs from a warm cache meet a machine that has changed


def spec() -> tuple[Region, list[Tensor]]:
    from codegen_cases import random_inputs, token_scale

    region = token_scale(64, 32)
    return region, random_inputs(region, 300, "cpu")


@pytest.mark.parametrize("strict", [False, True])
def test_launch_without_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool) -> None:
    from coda_inductor.core.interpret import interpret

    pretend(monkeypatch, tmp_path)
    make_open(monkeypatch, tmp_path / "kernels")
    region, inputs = spec()
    out = torch.empty(300, 64, dtype=BF16)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(strict)))
    launch_ = lowering.Launcher(region.text)
    if strict:
        with pytest.raises(Unsupported, match="others may write"):
            launch_(inputs, [out])
        return
    with pytest.warns(CodaWarning, match="a region runs as separate operations: others may write"):
        launch_(inputs, [out])
    launch_(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_launch_without_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool) -> None:
    from coda_inductor.core.interpret import interpret

    pretend(monkeypatch, tmp_path, build_fails)
    region, inputs = spec()
    out = torch.empty(300, 64, dtype=BF16)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(strict)))
    launch_ = lowering.Launcher(region.text)
    if strict:
        with pytest.raises(Unsupported, match=r"nvvm says no(.|\n)*without CODA_INDUCTOR_STRICT"):
            launch_(inputs, [out])
        return
    with pytest.warns(CodaWarning, match=r"separate operations: no kernel for region .* nvvm says no") as caught:
        launch_(inputs, [out])
        launch_(inputs, [out])
    assert len(caught) == 1 and torch.equal(out, interpret(region, inputs)[0])


# ---- settings while graphs live


def test_a_kernel_comes_from_the_directory_of_its_own_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is compiled or set before its first launch."""
    opened: list[str | None] = []
    monkeypatch.setattr(lowering, "kernel", lambda text, cache_dir, **how: opened.append(cache_dir) or print)  # type: ignore[func-returns-value]
    launches = []
    for name in "ab":
        ours = JointPass(Settings(cache_dir=name))
        with torch._inductor.config.patch(joint_custom_pre_pass=ours):  # as compile_fx does
            launches.append(lowering.Launcher(spec()[0].text))
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path))
    for launch_ in (*launches, *launches):
        assert launch_.kernel
    assert opened == ["a", "b"]


class Settled(CustomGraphPass):
    """A pass of the user's that sees, for each graph, the settings under which it is compiled."""

    def __init__(self) -> None:
        self.seen: list[Settings] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(lowering.current())

    def uuid(self) -> str:
        return "settled"


def test_backward_uses_the_settings_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles a backward late: what the environment says by then does not matter."""
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    torch._dynamo.reset()
    model, x, settled = half(), streams(), Settled()
    options: dict[str, Any] = {"inductor.post_grad_custom_post_pass": settled, "numerics": "strict"}
    found = torch.compile(model, backend="coda", options=options)(*x)
    monkeypatch.setenv("CODA_INDUCTOR_TARGTE", "nonsense")
    found.sum().backward()
    assert settled.seen == [Settings(target="reference", numerics="strict")] * 2
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(*x).sum().backward()
    assert len(grads) == 5
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        close(grad, parameter.grad)


def test_half_has_the_regions_that_these_tests_count() -> None:
    ran = run(half(), *streams(), options=REFERENCE)
    assert ran == [] and ran.regions == [3]
    assert [len(parse(s.region.text).products) for s in ran.reports[0].sites] == [1, 2, 1]
