"""What the user may choose, through torch.compile: each switch does what it says, a wrong one is said early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import REFERENCE, Centred, half, run, streams
from processes import python
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import coda_inductor.backend  # noqa: F401  (torch.compile imports it, and it reads the environment a first time)
from coda_inductor.core.settings import SettingError
from coda_inductor.passes.switches import NAMES, kind

pytestmark = pytest.mark.usefixtures("uncached")


# ---- off means off


def gradients(model: nn.Module, x: tuple[Tensor, ...], **compile_with: Any) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    inputs = [t.detach().requires_grad_() for t in x]
    output = run(model, *inputs, grad=True, **compile_with).output
    output.float().square().sum().backward()
    found = [output, *(t.grad for t in inputs), *(p.grad for p in model.parameters())]
    return [t.detach().clone() for t in found if t is not None]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "how"), [(torch.bfloat16, "environment"), (torch.float32, "option"), (torch.float64, "environment")]
)
def test_off_is_bit_identical_to_inductor(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, how: str) -> None:
    model, x = half(dtype), streams(dtype)
    wanted = [run(model, *x, backend="inductor").output, *gradients(model, x, backend="inductor")]
    if how == "environment":
        monkeypatch.setenv("CODA_INDUCTOR", "0")
    options: dict[str, Any] = {"options": {"enabled": False}} if how == "option" else {}
    ran = run(model, *x, **options)
    assert ran == [] and ran.reports == []
    found = [ran.output, *gradients(model, x, **options)]
    assert len(found) == 2 + 2 + 5 and all(map(torch.equal, found, wanted))


PROCESS = """
import sys, torch, torch._functorch.config, torch._inductor.config
from compiling import half, run, streams
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
ran = run(half(), *streams(), backend=sys.argv[1])
torch.save(ran.output, FILE)
doors = {"coda_inductor.kernels.kernel"}
print(len(ran), ran.regions, *sorted({"cutlass", "quack", *doors} & {*sys.modules}))
"""


def test_neither_off_nor_the_reference_loads_the_compiler(tmp_path: Path) -> None:
    """Nor does a machine without a GPU; and off is bit-identical from one process to another, with vectors too.
    (Inductor itself imports cutlass since torch 2.14.)"""
    outputs, loaded = {}, {}
    for name, said, environment in (
        ("off", ["0", "[]"], {"CODA_INDUCTOR": "0"}),
        ("reference", ["0", "[3]"], {"CODA_INDUCTOR_TARGET": "reference"}),
        ("auto", ["1", "[]"], {}),
        ("inductor", ["0", "[]"], {}),
    ):
        backend = "inductor" if name == "inductor" else "coda"
        code = PROCESS.replace("FILE", repr(str(tmp_path / name)))
        done = python(code, backend, **environment)
        assert done.returncode == 0, done.stderr
        found = done.stdout.splitlines()[-1].split()
        assert found[:2] == said or (name == "auto" and torch.cuda.is_available()), done.stdout + done.stderr
        outputs[name], loaded[name] = torch.load(tmp_path / name), found[2:]
    assert {*loaded["inductor"]} <= {"cutlass"}
    assert loaded["off"] == loaded["reference"] == loaded["inductor"]
    assert loaded["auto"] == loaded["inductor"] or torch.cuda.is_available()
    wanted = outputs["inductor"]
    assert torch.equal(outputs["off"], wanted) and torch.equal(outputs["auto"], wanted)
    assert torch.allclose(outputs["reference"], wanted, rtol=1e-12)


# ---- wrong names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tunes": "off"}, "SettingError: unknown option 'tunes' (did you mean 'tune'?"),
        ({"tune": "fastest"}, "SettingError: option 'tune': 'fastest' is not allowed (allowed: off, quick)"),
        ({"max_autotune": True}, "for Inductor, write 'inductor.max_autotune'"),
        ({"inductor.max_autotunes": True}, "unknown option of Inductor 'max_autotunes' (did you mean 'max_autotune'?)"),
        ({"inductor.epilog": True}, "unknown option of Inductor 'epilog' (did you mean 'epilogue_fusion'?)"),
        ({"inductor.qqqqq": True}, "unknown option of Inductor 'qqqqq' (nothing is like it)"),
        ({"disable": "bilinear"}, "unknown law, region kind or pass 'bilinear' (did you mean 'bilinearity'?)"),
        ({"only": "pairs"}, "unknown law, region kind or pass 'pairs' (did you mean 'pair'?)"),
    ],
)
def test_wrong_option_is_readable_through_dynamo(options: dict[str, Any], said: str) -> None:
    """Dynamo calls a backend first when the model runs, and wraps what it raises."""
    with pytest.raises(BackendCompilerFailed) as caught:
        run(half(), *streams(), options=options)
    text = str(caught.value)
    assert text.startswith("backend='coda' raised:\nSettingError: ") and said in text
    assert isinstance(caught.value.inner_exception, SettingError)
    assert len(text.splitlines()[1]) < 300


def test_wrong_variable_is_said_by_torch_compile_itself() -> None:
    """Before the model runs, and not wrapped: the backend is loaded by name then."""
    done = python(
        "import torch\ntorch.compile(lambda x: x, backend='coda')\nprint('compiled')", CODA_INDUCTOR_TUNES="off"
    )
    assert "compiled" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert "unknown environment variable 'CODA_INDUCTOR_TUNES' (did you mean 'CODA_INDUCTOR_TUNE'?)" in last
    assert done.returncode == 1


def test_variable_that_became_wrong_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGTE", "reference")
    with pytest.raises(BackendCompilerFailed, match="did you mean 'CODA_INDUCTOR_TARGET'"):
        run(half(), *streams())


# ---- laws and kinds of Regions


def kinds(model: nn.Module, *x: Tensor, **options: Any) -> tuple[list[str], set[str], list[str]]:
    """The kind of every Region, the laws that fired, and the Regions."""
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, options={**REFERENCE, "strict": True, **options})
    assert ran == [] and float((ran.output - wanted).norm() / wanted.norm()) < 1e-12
    sites = ran.reports[0].sites
    return [kind(s.region) for s in sites], {law for s in sites for law in s.laws}, [s.region.text for s in sites]


BEFORE = ["statistic", "pair", "pointwise"]
PLAIN = ["pointwise", "pair", "pointwise"]
EXPECTED: dict[tuple[str, str], list[str]] = {
    ("disable", "bilinearity"): PLAIN,  # the norm is made where it stands, so nothing asks for its sum
    ("disable", "gauge"): PLAIN,  # two products read one operand, which is stored in one scaling or not at all
    ("disable", "pair"): ["pointwise", "pointwise"],  # and nobody reads the sum
    ("disable", "statistic"): ["pair", "pointwise"],
    ("disable", "pointwise"): ["statistic", "pair"],
    ("only", "bilinearity"): PLAIN,
    ("only", "gauge"): PLAIN,
    ("only", "bilinearity,gauge"): BEFORE,
    ("only", "pair"): ["pair"],
    ("only", "pair,statistic"): ["statistic", "pair"],
    ("only", "statistic"): [],  # a sum that nobody may read is not made
    ("only", "pointwise"): ["pointwise"],
    ("only", "pointwise,bilinearity"): ["pointwise", "pointwise"],
    ("only", "tables"): [],
    ("disable", "tables"): BEFORE,
    ("only", "casts"): [],
    ("only", "casts,tables"): [],
    ("disable", "casts"): BEFORE,
    ("disable", "layouts"): BEFORE,  # test_tangents.py
    ("only", "layouts"): [],
    ("disable", "complex,elementwise,parts"): BEFORE,  # test_complex.py, test_elementwise_passes.py, test_parts.py
    ("only", "complex"): [],
    ("only", "elementwise"): [],
    ("only", "parts"): [],
    ("disable", "joined"): BEFORE,  # test_joined.py
    ("only", "joined"): [],
    ("disable", "factors"): BEFORE,  # test_factors.py
    ("only", "factors"): [],
    ("disable", "rows"): BEFORE,  # test_held.py
    ("only", "rows"): [],
    ("disable", "embedding"): BEFORE,  # test_embedding.py
    ("only", "embedding"): [],
    ("disable", "blocks"): BEFORE,  # test_row_blocks.py
    ("only", "blocks"): [],
    ("disable", "prefix"): BEFORE,  # test_prefix.py
    ("disable", "heads"): BEFORE,  # test_all_parts.py
    ("only", "heads"): [],
    ("disable", "attention"): BEFORE,  # test_written.py
    ("only", "attention"): [],
    ("disable", "masks"): BEFORE,  # test_masks.py
    ("only", "masks"): [],
    ("disable", "windows"): BEFORE,  # test_windows.py
    ("only", "windows"): [],
    ("disable", "positions"): BEFORE,  # test_positions.py
    ("only", "positions"): [],
    ("disable", "loss"): BEFORE,  # test_loss_written.py
    ("only", "loss"): [],
    ("disable", "grouped"): BEFORE,  # test_grouped.py
    ("only", "grouped"): [],
    ("disable", "undefined"): BEFORE,  # test_undefined.py
    ("only", "undefined"): [],
    ("only", "prefix"): [],
}
"""Half's Regions under a switch. _ONLY restricts the laws if it names one, and the kinds if it names one."""


@pytest.mark.sampled
@pytest.mark.parametrize(("how", "names"), EXPECTED)
def test_law_or_kind_switched(how: str, names: str) -> None:
    found, laws, _ = kinds(half(), *streams(), **{how: names})
    assert found == EXPECTED[how, names]
    assert laws == ({"bilinearity"} if "statistic" in found and "pair" in found else set())


def test_every_law_and_kind_has_a_switch_that_is_tested() -> None:
    named = {name for _, names in EXPECTED for name in names.split(",")}
    assert named | ELSEWHERE == NAMES


# Of norms that take a mean away, of backwards (relu, root: test_signs.py), and of losses (test_softmax.py). Tables are
# in test_tables.py, too, halves of heads in test_halves.py, two products in one sum in test_summed.py, what is bare or
# cast in test_bare.py.
ELSEWHERE = {"shift", "moments", "triangle", "adjoint", "relu", "root", "softmax", "halves", "summed", "bare"}


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_laws_of_other_graphs_do_nothing_here(name: str) -> None:
    assert kinds(half(), *streams(), disable=name) == kinds(half(), *streams())


def test_laws_of_centred_norms() -> None:
    model, x = Centred().double(), streams()[0]
    before = kinds(model, x)
    assert before[0] == ["pointwise", "statistic", "pointwise", "pointwise"]
    assert kinds(model, x, disable="moments")[0] == ["pointwise"] * 4
    unshifted = kinds(model, x, disable="shift")
    assert unshifted[0] == before[0] and unshifted[2] != before[2]
    assert kinds(model, x, disable="pair") == before


def test_strict_numerics_use_no_law() -> None:
    assert kinds(half(), *streams(), numerics="strict")[:2] == (PLAIN, set())
