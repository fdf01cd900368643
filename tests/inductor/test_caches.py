"""Warm starts: what a second process finds, what makes it look again, and two processes at once on one store."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from codegen_cases import token_scale
from compiling import REFERENCE, half, pretend, run, streams
from processes import Script, fresh

from coda_inductor.codegen import target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import joint_pass, settle
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.kernels.prebuild import Job, prebuild

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys, torch
from quick import quick
quick()
from torch._dynamo.utils import counters
from compiling import half, run, streams
options = json.loads(sys.argv[1])
if options.pop("pretend", None):
    import pathlib, pytest
    from compiling import pretend
    pretend(pytest.MonkeyPatch(), pathlib.Path(sys.argv[3]))
    dtype = torch.bfloat16
else:
    dtype = torch.float64
ran = run(half(dtype), *streams(dtype), options=options)
torch.save(ran.output, sys.argv[2])
found = {f"{k}.{n}": v for k in ("aot_autograd", "inductor") for n, v in counters[k].items() if "cache" in n}
print(json.dumps({"said": list(ran), "regions": ran.regions, **found}))
"""


class Process:
    """Runs SCRIPT with one directory for Inductor's caches; `regions` are those of the rewrites that happened."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, package: Path = ROOT, name: str = "out", **options: Any) -> Script:
        arguments = json.dumps(options), str(self.directory / name), str(self.directory)
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor")}
        return Script(SCRIPT, *arguments, package=package, cwd=self.directory, environment=cache)

    def read(self, script: Script, name: str = "out") -> dict[str, Any]:
        return self.found(script.done(), name)

    def found(self, done: CompletedProcess[str], name: str) -> dict[str, Any]:
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found | {"output": torch.load(self.directory / name)}

    def __call__(self, **options: Any) -> dict[str, Any]:
        return self.read(self.start(**options))

    def fresh(self, seed: str, **options: Any) -> dict[str, Any]:
        """In an interpreter with another seed of hashes and other addresses, on which no key may depend."""
        arguments = json.dumps(options), str(self.directory / "out"), str(self.directory)
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"), "PYTHONHASHSEED": seed}
        return self.found(fresh(SCRIPT, *arguments, cwd=self.directory, **environment), "out")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    return Process(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def cold(process: Process) -> dict[str, Any]:
    return process.fresh("1", target="reference")


def test_first_process_misses(cold: dict[str, Any]) -> None:
    assert cold["said"] == [] and cold["regions"] == [3]
    assert cold["aot_autograd.autograd_cache_miss"] == 1 and cold["aot_autograd.autograd_cache_saved"] == 1


def test_second_process_hits_and_does_not_rewrite(process: Process, cold: dict[str, Any]) -> None:
    warm = process.fresh("2", target="reference")
    assert warm["said"] == [] and warm["regions"] == []
    assert warm["aot_autograd.autograd_cache_hit"] == 1 and "aot_autograd.autograd_cache_miss" not in warm
    assert torch.equal(warm["output"], cold["output"])


def test_another_setting_misses(process: Process, cold: dict[str, Any]) -> None:
    other = process(target="reference", disable="bilinearity")
    assert other["regions"] == [3] and other["aot_autograd.autograd_cache_miss"] == 1


def test_another_source_misses(process: Process, cold: dict[str, Any], tmp_path: Path) -> None:
    """The same package with a comment more."""
    import shutil

    shutil.copytree(ROOT / "coda_inductor", tmp_path / "coda_inductor", ignore=shutil.ignore_patterns("__pycache__"))
    laws = tmp_path / "coda_inductor" / "rewrite" / "laws.py"
    laws.write_text(laws.read_text() + "# changed\n")
    other = process(package=tmp_path, target="reference")
    assert other["regions"] == [3] and other["aot_autograd.autograd_cache_miss"] == 1


def test_kernels_are_called_from_a_warm_cache(process: Process) -> None:
    """The text that Inductor keeps finds its kernels again, and nothing is measured twice."""
    first, second = process.fresh("1", pretend=True), process.fresh("2", pretend=True)
    assert first["said"] == second["said"] == []
    assert first["regions"] == [3] and second["regions"] == []
    assert second["aot_autograd.autograd_cache_hit"] == 1
    assert torch.equal(first["output"], second["output"])


# ---- in one process


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's caches on, for keys of this test alone."""
    monkeypatch.setattr(joint_pass, "sources_digest", lambda: f"these {tmp_path}")
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        yield


def test_a_cached_graph_is_not_rewritten_again(cached: None) -> None:
    assert run(half(), *streams(), options=REFERENCE).regions == [3]
    assert run(half(), *streams(), options=REFERENCE).regions == []


def test_what_failed_is_not_cached(cached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process tries again, and is told if it fails again."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("provoked")

    with monkeypatch.context() as patch:
        patch.setattr(settle, "lift", fail)
        assert len(run(half(), *streams(), options=REFERENCE)) == 1
    ran = run(half(), *streams(), options=REFERENCE)
    assert ran == [] and ran.regions == [3]
    assert run(half(), *streams(), options=REFERENCE).regions == []


def test_a_region_that_could_not_be_measured_is_not_cached(
    cached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("provoked")

    dtype = torch.bfloat16
    with monkeypatch.context() as patch:
        pretend(patch, tmp_path, no_memory)
        ran = run(half(dtype), *streams(dtype))
        assert len(ran) == 1 and ran.regions == [0]
    pretend(monkeypatch, tmp_path)
    ran = run(half(dtype), *streams(dtype))
    assert ran == [] and ran.regions == [3]


def test_what_is_unsupported_is_cached(cached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be refused again, so Inductor's warm start is kept."""
    pretend(monkeypatch, tmp_path)
    assert len(run(half(), *streams())) == 1
    torch._dynamo.utils.counters.clear()
    run(half(), *streams())
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1


# ---- the identity of the pass


def test_uuid_covers_settings_sources_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid(**settings: Any) -> Any:
        return JointPass(Settings(**settings)).uuid()

    monkeypatch.setattr(target, "version_of", lambda p: "1.0")
    base = uuid()
    assert base == uuid() == uuid(cache_dir="/elsewhere")
    changes: list[dict[str, Any]] = [
        {"disable": frozenset({"gauge"})}, {"only": frozenset({"pair"})}, {"numerics": "strict"}, {"tune": "off"},
        {"target": "reference"}, {"strict": True},
    ]  # fmt: skip
    assert len({base, *(uuid(**change) for change in changes)}) == 1 + len(changes)
    assert uuid(debug_dir="/somewhere") is None  # people want to read: nothing is taken from a cache
    for package in ("torch", "quack-kernels", "nvidia-cutlass-dsl"):
        with monkeypatch.context() as patch:
            patch.setattr(target, "version_of", lambda p, package=package: "9.9" if p == package else "1.0")
            assert uuid() != base
    monkeypatch.setattr(joint_pass, "sources_digest", lambda: "others")
    assert uuid() != base


def test_digest_reads_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or whole(path))  # type: ignore[func-returns-value]
    joint_pass.sources_digest.__wrapped__()
    assert {p.resolve() for p in read} == {p.resolve() for p in Path(joint_pass.__file__).parents[1].rglob("*.py")}


# ---- two processes at once


def test_two_processes_at_once_measure_into_one_store(tmp_path: Path) -> None:
    both = Process(tmp_path)
    started = [both.start(name=name, pretend=True) for name in "ab"]
    first, second = (both.read(p, name) for p, name in zip(started, "ab", strict=True))
    assert first["said"] == second["said"] == []
    assert torch.equal(first["output"], second["output"])
    records = list((tmp_path / "kernels" / "tuning").iterdir())
    assert len(records) >= 4 and all(json.loads(p.read_text()) for p in records)  # and no temporary file is left


MISSING = [name for name in ("cutlass", "quack", "triton") if importlib.util.find_spec(name) is None]
compiles = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


def objects(directory: Path) -> dict[Path, int]:
    """Compiled kernels, with the time of their making."""
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*.o"))}


BUILD = """
import sys
from codegen_cases import token_scale
from coda_inductor.codegen.tiles import Config
from coda_inductor.kernels.prebuild import Job, prebuild
print(prebuild([Job(token_scale(64, 32), Config(128, 128, 1, 1, True))], sys.argv[1], workers=1))
"""
JOB = Job(token_scale(64, 32), Config(128, 128, 1, 1, True))


@compiles
def test_kernel_compiled_by_two_processes_and_broken(tmp_path: Path) -> None:
    """It is compiled once, and found again; a broken object or module is made again."""
    store = tmp_path / "kernels"
    both = [Script(BUILD, str(store)) for _ in "ab"]
    assert [script.done().stdout.strip() for script in both] == ["{}", "{}"]
    made = objects(store)
    ((kernel, _),) = made.items()
    size = kernel.stat().st_size
    assert not list(store.rglob("*.tmp*"))
    assert prebuild([JOB], str(store), workers=1) == {} and objects(store) == made
    (module,) = store.glob("epilogues/*.py")
    kernel.write_bytes(kernel.read_bytes()[: size // 2])
    module.write_text("not a module")
    assert prebuild([JOB], str(store), workers=1) == {}
    assert kernel.stat().st_size == size and "def epilogue" in module.read_text()
