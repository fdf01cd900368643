"""Another torch than the tested ones, and one without a private name that we need: one warning, and Inductor compiles
as it does alone. A wrong setting is an error all the same."""

from __future__ import annotations

import tomllib
import types
from pathlib import Path

import pytest
import torch
from compiling import REFERENCE, half, left_to_inductor, raised, run, streams
from processes import python
from torch import fx

from coda_inductor import backend, cli
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.settings import SettingError, Settings
from coda_inductor.core.versions import TESTED, TORCH, check_torch, missing, numbers
from coda_inductor.inductor import tangents

pytestmark = pytest.mark.usefixtures("uncached")

FIRST, LAST = (".".join(map(str, release)) for release in TORCH)


def pretend_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """As if our backend had been imported with that version."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(backend, "LOADED", backend.load())


# ---- versions


@pytest.mark.parametrize("version", [f"{FIRST}.0", "2.13.0+cpu", "2.14.0a0+gitc0ffee", f"{LAST}.1", f"{LAST}.0rc2"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_torch()


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cu128", "2.16.0", "2.16.0.dev20261101", "3.0.0", "unknown"])
def test_versions_that_were_not_tested(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(Unsupported) as caught:
        check_torch()
    assert caught.value.what == f"torch {version} was not tested; {FIRST} to {LAST} were tested"


def test_the_package_asks_for_the_first_tested_version_and_for_no_last_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (asked,) = [d for d in project["dependencies"] if d.startswith("torch")]
    assert asked == f"torch>={FIRST}"


def test_leading_numbers() -> None:
    assert [numbers(v) for v in ("4.8.1", "4.8.1rc1", "2.13.0+cpu", "x")] == [(4, 8, 1), (4, 8), (2, 13, 0), ()]


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0"])
def test_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_torch(monkeypatch, version)
    said = f"torch {version} was not tested; {TESTED}"
    ran = left_to_inductor(f"every graph is left to Inductor: {said} (CODA_INDUCTOR=0 does so", options=REFERENCE)
    assert torch.equal(ran.output, run(half(torch.bfloat16), *streams(torch.bfloat16), backend="inductor").output)
    raised(monkeypatch, said)
    assert run(half(), *streams(), options={"enabled": False}) == []  # off means off


def test_outside_the_tested_range_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "2.16.0")
    with pytest.raises(Exception, match="unknown option 'tunes'"):
        run(half(), *streams(), options={"tunes": "off"})
    with pytest.raises(Exception, match="max_autotunes"):
        run(half(), *streams(), options={"inductor.max_autotunes": True})
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "fastest")
    with pytest.raises(SettingError, match="'fastest' is not allowed"):
        backend.load()


def test_outside_the_tested_range_explain_promises_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_model.py").write_text("import torch\ndef build():\n    return torch.sin, (torch.zeros(2),)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    assert cli.main(["explain", "some_model:build"]) == 2
    said = capsys.readouterr().err
    assert said == f"coda-inductor: error: torch 2.16.0 was not tested; {TESTED}\n"


def test_a_law_that_does_not_exist_is_said_when_the_backend_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", "bilinear")
    with pytest.raises(SettingError, match="did you mean 'bilinearity'"):
        backend.load()


# ---- names


SCRIPT = """
import importlib, sys, warnings, torch
from torch._functorch import config
from torch._inductor import config as inductor_config
config.enable_autograd_cache = inductor_config.fx_graph_cache = False
delattr(importlib.import_module(sys.argv[1]), sys.argv[2])
linear = torch.nn.Linear(8, 8)
x = torch.randn(4, 8)

def compiled(backend, **how):
    torch._dynamo.reset()
    return torch.compile(lambda x: linear(x).relu(), backend=backend, **how)(x)

wanted = compiled(lambda gm, inputs: torch._inductor.compile(gm, inputs))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [compiled("coda"), compiled("coda", mode="max-autotune-no-cudagraphs"),
             compiled("coda", options={"inductor.max_autotune": True})]
    torch._dynamo.reset()
print(*(f"{torch.equal(out, wanted)}" for out in found))
print(*(str(w.message) for w in caught if w.category.__name__ == "CodaWarning"), sep="\\n")
from coda_inductor import cli
sys.stdout = sys.stderr
print("doctor", cli.main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("torch._inductor.lowering", "register_lowering", "cannot import name {1!r} from {0!r}"),
        (
            "torch._functorch._aot_autograd.descriptors",
            "SubclassStrideAOTOutput",
            "module {0!r} has no attribute {1!r}",
        ),
    ],
)
def test_a_missing_name(module: str, name: str, said: str) -> None:
    """Without it the backend is imported, says once which one it is, and compiles as Inductor does."""
    done = python(SCRIPT, module, name)
    assert done.returncode == 0, done.stderr
    outputs, *warned = done.stdout.splitlines()
    assert outputs == "True True True"
    said = f"{said.format(module, name)}, with torch {torch.__version__}; {TESTED}"
    hint = "(CODA_INDUCTOR=0 does so without a warning)"
    assert warned == [f"coda_inductor: every graph is left to Inductor: {said} {hint}"]
    assert said in done.stderr and "Traceback" not in done.stderr  # doctor


def another(mode: str | None, options: dict[str, object] | None) -> object:
    """Stands for a wrapper that takes other arguments."""
    raise AssertionError("not reached")


@pytest.mark.parametrize("wrapper", [None, another])
def test_a_missing_way_into_inductor(monkeypatch: pytest.MonkeyPatch, wrapper: object) -> None:
    """Of what backend="inductor" goes through only the documented function is left. Mode and options reach that."""
    monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    if wrapper:
        monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", wrapper, raising=False)
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda *arguments: given.append(arguments))
    graph, options = fx.symbolic_trace(torch.nn.ReLU()), {"coordinate_descent_tuning": False}
    backend.stock("max-autotune-no-cudagraphs", options)(graph, ())
    backend.stock(None, {})(graph, ())
    assert given == [(graph, [], {"max_autotune": True, **options}), (graph, [], {})]


def test_a_name_that_is_missing_when_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangents, "functorch_config", types.ModuleType("torch._functorch.config"))
    said = "module 'torch._functorch.config' has no attribute 'guess_tangent_strides_as_outputs', with torch "
    left_to_inductor(f"every graph is left to Inductor: {said}", options=REFERENCE)
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    raised(monkeypatch, said, TESTED)


def test_an_error_of_inductors_own_is_not_taken_for_a_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as it is under backend="inductor", once: nothing is compiled again."""

    def fail(gm: fx.GraphModule, *_: object, **__: object) -> object:
        raise AttributeError("provoked")

    monkeypatch.setattr("coda_inductor.inductor.compile.compile_fx", fail)
    with pytest.raises(Exception, match="AttributeError: provoked"):
        run(half(), *streams(), options=REFERENCE)


def test_a_name_of_ours_is_not_taken_for_one_of_torchs() -> None:
    name = "nothing"
    for owner in (backend, Settings(), Settings):
        with pytest.raises(AttributeError) as raised:
            getattr(owner, name)
        assert isinstance(missing(raised.value), BrokenInvariant)


@pytest.mark.parametrize(
    "place", ["/usr/lib/python3/torch/x (old)/__init__.py", r"C:\torch\__init__.py", "unknown location"]
)
def test_no_place_on_the_machine_is_said(place: str) -> None:
    said = missing(ImportError(f"cannot import name 'x' from 'torch.y' ({place})")).what
    assert said == f"cannot import name 'x' from 'torch.y', with torch {torch.__version__}; {TESTED}"
