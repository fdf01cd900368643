"""What the user may choose, through torch.compile: each switch does what it says, a wrong one is said early."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import INNER, REFERENCE, Centred, half, pretend, run, streams
from processes import python
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import coda_inductor.backend  # noqa: F401  (torch.compile imports it, and it reads the environment a first time)
from coda_inductor.core.settings import SettingError, Settings
from coda_inductor.inductor.joint_pass import REPORTS, JointPass
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
}
"""Half's Regions under a switch. _ONLY restricts the laws if it names one, and the kinds if it names one."""


@pytest.mark.parametrize(("how", "names"), EXPECTED)
def test_law_or_kind_switched(how: str, names: str) -> None:
    found, laws, _ = kinds(half(), *streams(), **{how: names})
    assert found == EXPECTED[how, names]
    assert laws == ({"bilinearity"} if "statistic" in found and "pair" in found else set())


def test_every_law_and_kind_has_a_switch_that_is_tested() -> None:
    named = {name for _, names in EXPECTED for name in names.split(",")}
    assert named | ELSEWHERE == NAMES


# Of norms that take a mean away, of backwards, and of losses (test_softmax.py). Tables are in test_tables.py, too,
# halves of heads in test_halves.py, two products in one sum in test_summed.py, what is bare or cast in test_bare.py.
ELSEWHERE = {"shift", "moments", "triangle", "adjoint", "softmax", "halves", "summed", "bare"}


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


# ---- for people to read


def test_debug_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder for each graph; also for graphs that Inductor has in its cache."""
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    root, dtype = tmp_path / "debug", torch.bfloat16
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            ran = run(half(dtype), *streams(dtype), options={"debug_dir": root})
            assert ran == [] and ran.regions == [3]
    run(half(dtype), *streams(dtype, 8), options={"debug_dir": root})
    run(torch.sin, streams(dtype)[0], options={"debug_dir": root})
    assert sorted(p.name for p in root.iterdir()) == [f"graph_{i:03d}" for i in range(4)]
    for first in ("graph_000", "graph_001"):
        before, after = ((root / first / f"{name}.py").read_text() for name in ("before", "after"))
        assert before.count("aten.mm.default") == 4 and "coda.region" not in before and "compiling.py" in before
        assert after.count("coda.region.default(") == 3 and "aten.mm.default(" not in after
        told = (root / first / "regions.txt").read_text()
        sites = ran.reports[0].sites
        assert all(f"# {s.name} {s.source}" in told for s in sites) and told.count(f", {INNER}] = in0 @") == 2
        kernels = sorted((root / first / "kernels").iterdir())
        assert [p.name for p in kernels] == [f"{s.name}_{s.region.digest}.py" for s in sites]
        assert all("def epilogue(acc" in p.read_text() for p in kernels)
    assert "left to Inductor: " in (root / "graph_002" / "regions.txt").read_text()
    assert "fewer than 256" in (root / "graph_002" / "regions.txt").read_text()
    assert "no matrix product" in (root / "graph_003" / "regions.txt").read_text()


def test_debug_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run(half(), *streams(), options={**REFERENCE, "debug_dir": tmp_path / "file"})
    assert ran.regions == [3] and len(ran) == 1 and "nothing is written for debugging: " in ran[0]


def test_log_shows_regions_and_refusals(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "coda_inductor"):
        run(half(), *streams(), options={**REFERENCE, "disable": "bilinearity"})
    text = caplog.text
    assert "3 regions, " in text and "store v" in text and "refused: " in text


def test_torch_logs_knows_our_name(tmp_path: Path) -> None:
    code = """
import torch._logging._internal
torch._logging._internal._init_logs()  # TORCH_LOGS, as when torch is imported
from compiling import *
from quick import quick
quick()
run(half(), *streams(), options=REFERENCE)
"""
    done = python(code, TORCH_LOGS="+coda_inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert (
        done.returncode == 0
        and "3 regions, " in done.stderr
        and "# r0 " in done.stderr
        and "(K=64, f64)" in done.stderr
    ), done.stderr[-2000:]


def test_tlparse_artifact_for_every_graph(tmp_path: Path) -> None:
    code = """
import sys, torch._logging._internal
torch._logging._internal.LOG_TRACE_HANDLER.root_dir = sys.argv[1]  # TORCH_TRACE, when torch is imported
from compiling import *
from quick import quick
quick()
run(half(), *streams(), options=REFERENCE)
run(half(), *streams())
run(torch.sin, streams()[0], options=REFERENCE)
"""
    done = python(code, str(tmp_path / "trace"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cached"))
    assert done.returncode == 0, done.stderr
    text = "".join(p.read_text() for p in (tmp_path / "trace").iterdir())
    assert text.count('"name": "coda_regions"') >= 2
    assert "load " in text and "left to Inductor: no matrix product" in text


# ---- how torch.compile is called


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("reduce-overhead", {"mode": "reduce-overhead"}),
    ("max-autotune", {"mode": "max-autotune"}),
    ("max-autotune-no-cudagraphs", {"mode": "max-autotune-no-cudagraphs"}),
    ("dynamic", {"dynamic": True}),
    ("fullgraph", {"fullgraph": True}),
    ("memory planning", {"options": {"inductor.memory_planning": True}}),
    ("no pattern matcher", {"options": {"inductor.pattern_matcher": False}}),
    ("freezing", {"options": {"inductor.freezing": True}}),
]


@pytest.mark.parametrize("compile_with", [c for _, c in CALLS], ids=[name for name, _ in CALLS])
def test_way_of_calling(monkeypatch: pytest.MonkeyPatch, compile_with: dict[str, Any]) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half().eval(), streams()
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, **compile_with)
    assert ran == [] and ran.regions == [3]
    torch.testing.assert_close(ran.output, wanted)


@pytest.mark.parametrize("compile_with", [c for _, c in CALLS], ids=[name for name, _ in CALLS])
def test_way_of_calling_with_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_with: dict[str, Any]
) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, x = half(torch.bfloat16).eval(), streams(torch.bfloat16)
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, **compile_with)
    assert ran == [] and ran.regions == [3]
    torch.testing.assert_close(ran.output, wanted, atol=0.1, rtol=0.1)


def test_the_cpp_wrapper_is_left_to_inductor() -> None:
    """It does not even escape a string argument (torch 2.13)."""
    model, x = half(), streams()
    ran = run(model, *x, options={**REFERENCE, "inductor.cpp_wrapper": True})
    assert len(ran) == 1 and "C++ wrapper" in ran[0] and ran.reports == []
    torch.testing.assert_close(ran.output, model(*x).detach())


def test_several_batches_need_one_dynamic_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model = half()
    first = run(model, *streams(tokens=300), options=REFERENCE, dynamic=True)
    assert first.regions == [3]
    compiled = torch.compile(model, backend="coda", options=REFERENCE, dynamic=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch.no_grad():
        for tokens in (300, 7, 1000, 64):
            torch.testing.assert_close(compiled(*streams(tokens=tokens)), model(*streams(tokens=tokens)))
    assert counters["stats"]["unique_graphs"] == 1


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(half() for _ in range(blocks))

    def forward(self, a: Tensor, r: Tensor) -> Tensor:
        for block in self.blocks:
            r = block(a, r)
        return r


def test_module_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    torch._dynamo.reset()
    model, x = half(), streams()
    wanted = model(*x).detach()
    model.compile(backend="coda")
    REPORTS.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(*x), wanted)
    assert [len(r.sites) for r in REPORTS] == [3]


def per_block(stack: Stack) -> Callable[..., Tensor]:
    for block in stack.blocks:
        block.compile(backend="coda", options=REFERENCE)
    return stack


def partly(stack: Stack) -> Callable[..., Tensor]:
    stack.blocks[1].forward = torch.compiler.disable(stack.blocks[1].forward)
    return torch.compile(stack, backend="coda", options=REFERENCE)


def nested(stack: Stack) -> Callable[..., Tensor]:
    """A compiled block inside of a compiled model: Dynamo makes one graph of both."""
    stack.blocks[1].compile(backend="coda", options=REFERENCE)
    return torch.compile(stack, backend="coda", options=REFERENCE)


def regions_of_dynamo(stack: Stack) -> Callable[..., Tensor]:
    region = torch.compiler.nested_compile_region(lambda block, a, r: block(a, r))

    def forward(a: Tensor, r: Tensor) -> Tensor:
        for block in stack.blocks:
            r = region(block, a, r)
        return r

    return torch.compile(forward, backend="coda", options=REFERENCE)


@pytest.mark.parametrize("make", [per_block, partly, nested, regions_of_dynamo])
def test_nested_and_partial_compile(make: Callable[[Stack], Callable[..., Tensor]]) -> None:
    torch._dynamo.reset()
    stack, x = Stack(), streams()
    wanted = stack(*x).detach()
    REPORTS.clear()
    with torch.no_grad():
        torch.testing.assert_close(make(stack)(*x), wanted)
    found = [len(r.sites) for r in REPORTS]
    assert found and all(n > 3 if make is nested else n == 3 for n in found)


# ---- the user's own pass


class Theirs(CustomGraphPass):
    """Counts the products that it sees, and takes every bias-free sin out."""

    def __init__(self, name: str = "theirs") -> None:
        self.name, self.seen = name, list[int]()

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(sum(n.target is torch.ops.aten.mm.default for n in graph.nodes))

    def uuid(self) -> str:
        return self.name


@pytest.mark.parametrize("how", ["option", "config", "list"])
def test_a_pass_of_the_users_runs_first(how: str) -> None:
    theirs = Theirs()
    chained: Any = [theirs, theirs] if how == "list" else theirs
    if how == "option":
        ran = run(half(), *streams(), options={**REFERENCE, "inductor.joint_custom_pre_pass": chained})
    else:
        with torch._inductor.config.patch(joint_custom_pre_pass=chained):
            ran = run(half(), *streams(), options=REFERENCE)
    assert ran == [] and ran.regions == [3]
    assert theirs.seen == [4] * (2 if how == "list" else 1)


def test_uuid_is_that_of_both() -> None:
    def uuid(chained: Any, **settings: Any) -> Any:
        return JointPass(Settings(**settings), chained).uuid()

    one, other = uuid(Theirs()), uuid(Theirs("other"))
    assert one and other and one != other and uuid(None) not in (one, other)
    assert uuid(lambda graph: None) is None  # what Inductor does with a pass that it cannot identify
    assert uuid(Theirs("")) is None
    assert uuid([Theirs(), Theirs("other")]) not in (None, one)


def test_an_error_of_theirs_is_theirs() -> None:
    class Fails(Theirs):
        def __call__(self, graph: fx.Graph) -> None:
            raise ValueError("theirs")

    with pytest.raises(BackendCompilerFailed, match="ValueError: theirs"):
        run(half(), *streams(), options={**REFERENCE, "inductor.joint_custom_pre_pass": Fails()})
