"""The command: each verb with what is behind it replaced, each mistake said in one line, the real thing once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import BROKEN
from processes import Script

from coda_inductor import __version__, cli
from coda_inductor.core.errors import BrokenInvariant, CodaError, Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain.report import NOTHING
from coda_inductor.passes import switches

SUBJECT = ("model", (1,), {"key": 2})
MODEL = (
    """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)), (torch.randn(4, 8),)

def wrong():
    return 3

def needs():
    import no_such_library

def bare():
    return torch.nn.Linear(8, 8), torch.randn(4, 8)

def raises():
    return {}["no such size"]

def misfit():
    return torch.randn(3, 4) @ torch.randn(3, 4)

class Misfit(torch.nn.Module):
    def forward(self, x):
        return x @ torch.randn(7, 7)

def fails():
    return Misfit(), (torch.randn(4, 8),)

def plain():
    return torch.nn.GELU(), (torch.randn(4, 8),)

def unfit():
    return torch.nn.GELU(), (torch.randn(4, 8),), {"approximate": "tanh"}

def asks(x):
    return torch.nn.GELU(), (x,)

class Talks(torch.nn.Linear):
    def forward(self, x):
        print("the model's own words")
        return super().forward(x)

def talks():
    return Talks(8, 8).requires_grad_(False), (torch.randn(4, 8),)

def stopped():
    raise KeyboardInterrupt

number = 3
"""
    + BROKEN
)


class Calls:
    """Stands for the modules behind the command and remembers what they were asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def explain(self, *asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"schema": 1, "graphs": []}

    def program(self, *asked: Any) -> dict[str, str]:
        self.asked.append(asked)
        return {"before": "as it was", "after": "as it is"}

    def list_program(self, facts: dict[str, str], before: bool) -> str:
        return facts["before" if before else "after"]

    def load(self, spec: str) -> Any:
        self.asked.append(spec)
        return SUBJECT

    def render(self, report: dict[str, Any], every: bool) -> str:
        return "every Region" if every else f"report of schema {report['schema']}"

    def module(self, name: str) -> Any:
        if name == switches.__name__:
            return switches
        functions: dict[str, dict[str, Callable[..., Any]]] = {
            "explain": {"explain": self.explain, "render": self.render},
            "explain.steps": {"program": self.program},
            "explain.listing": {"render": self.list_program},
            "explain.capture": {"load": self.load},
        }
        return SimpleNamespace(**functions[name.removeprefix("coda_inductor.")])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    stand_in = Calls()
    monkeypatch.setattr(cli, "behind", stand_in.module)
    return stand_in


def test_explain(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "m:f", "--mode", "train", "--target", "sm_90a"]) == 0
    assert calls.asked == ["m:f", (*SUBJECT, "train", Settings(target="sm_90a"))]
    assert capsys.readouterr().out == "report of schema 1\n"


def test_explain_each_region(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "m:f", "--all"]) == 0
    assert capsys.readouterr().out == "every Region\n"


def test_defaults(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    assert cli.main(["explain", "m:f"]) == 0
    assert calls.asked[1] == (*SUBJECT, "infer", Settings(target="reference"))


def test_a_flag_wins_over_the_environment(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    assert cli.main(["graph", "m:f", "--target", "sm_90a"]) == 0
    assert calls.asked[1][-1].target == "sm_90a"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "as it is"), (["--before"], "as it was"), (["--json"], {"before": "as it was", "after": "as it is"})],
)
def test_graph(calls: Calls, capsys: pytest.CaptureFixture[str], arguments: list[str], said: object) -> None:
    assert cli.main(["graph", "m:f", *arguments]) == 0
    out = capsys.readouterr().out
    assert (json.loads(out) if "--json" in arguments else out.strip()) == said


def test_explain_as_json(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "m:f", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "graphs": []}


@pytest.mark.parametrize("kind", [Unsupported, BrokenInvariant])
def test_errors_say_what_where_and_what_to_do(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[CodaError]
) -> None:
    def fail(*_: Any) -> Any:
        raise kind("strides (1, 4096)", where="model.py:41", hint="call .contiguous()")

    monkeypatch.setattr(calls, "explain", fail)
    assert cli.main(["explain", "m:f"]) == 2
    said = capsys.readouterr()
    assert said.err == "coda-inductor: error: model.py:41: strides (1, 4096) (call .contiguous())\n"
    assert said.out == ""


def test_a_bug_of_ours_keeps_its_traceback(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "explain", None)
    with pytest.raises(TypeError, match="not callable"):
        cli.main(["explain", "m:f"])


def test_an_unknown_setting_is_an_error(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TUNES", "off")
    assert cli.main(["explain", "m:f"]) == 2
    assert "did you mean 'CODA_INDUCTOR_TUNE'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["explode", "m:f"], ["explain"], ["explain", "m:f", "--mode", "fly"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: coda-inductor" in capsys.readouterr().err


def test_no_verb_prints_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: coda-inductor" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "VERSIONS", ("torch", "no-such-library"))
    assert cli.main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"coda-inductor {__version__} (Python 3") and "torch 2" in said
    assert "no no-such-library" in said


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said and verb.help in said for name, verb in cli.VERBS.items())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module `their_model`."""
    (tmp_path / "their_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("their_model", "'their_model' names no function (write MODULE:FUNCTION"),
        ("no_such_module:f", "no_such_module:f: cannot import it: No module named 'no_such_module'"),
        ("their_model:missing", "module 'their_model' has no function 'missing'"),
        ("their_model:number", "module 'their_model' has no function 'number'"),
        ("their_model:wrong", "their_model:wrong returned int (return (model, args)"),
        ("their_model.py:build", "'their_model.py' is a file, not a module (drop the .py: their_model:build)"),
        ("./their_model:build", "'./their_model' is a file, not a module (write their_model:build)"),
        ("sub/their_model:build", "'sub/their_model' is a file, not a module (write sub.their_model:build)"),
        ("their_model:asks", "their_model:asks takes arguments: missing a required argument: 'x' (name a function"),
        (
            "their_model:unfit",
            "their_model:unfit returned do not fit its model: got an unexpected keyword argument 'app",
        ),
        ("their_model:broken", "captures no graph of this model: all of it runs eagerly (TORCH_LOGS=graph_breaks"),
        ("their_model:bare", "returned a tensor where a tuple is wanted (return (model, (tensor,)))"),
        ("their_model:raises", "their_model.py:17: KeyError: 'no such size' (--traceback"),
        ("their_model:misfit", "their_model.py:20: RuntimeError: "),
        (
            "their_model:fails",
            "their_model.py:24: TorchRuntimeError: RuntimeError('a and b must have same reduction dim",
        ),
        ("their_model:needs", "their_model:needs: cannot import it: No module named 'no_such_library'"),
    ],
)
def test_a_wrong_subject_is_one_line(here: Path, spec: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", spec]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("coda-inductor: error: ") and error.count("\n") == 1


def test_what_the_model_prints_is_no_part_of_the_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "their_model:talks", "--mode", "train", "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert facts["mode"] == "train" and {g["kind"] for g in facts["graphs"]} == {"inference"}
    assert "the model's own words" in said.err


def test_inference_and_an_untouched_graph_are_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "their_model:talks", "--mode", "train", "--target", "reference"]) == 0
    said = capsys.readouterr().out
    assert "nothing needs a gradient: this is inference" in said
    assert f"left to Inductor as a whole: {NOTHING}" in said
    assert cli.main(["explain", "their_model:talks", "--target", "reference", "--json"]) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert NOTHING in [r["reason"] for graph in graphs for r in graph["refused"]]


def test_interrupted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "their_model:stopped"]) == 130
    assert capsys.readouterr().err == "coda-inductor: interrupted\n"


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_traceback_on_demand(here: Path, by_flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(not by_flag)))
    with pytest.raises(KeyError):
        cli.main(["explain", "their_model:raises", *["--traceback"] * by_flag])


def test_a_model_without_a_product_is_said_to_have_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("explain", "graph", "kernels"):
        assert cli.main([verb, "their_model:plain"]) == 0
        assert "it has no matrix product" in capsys.readouterr().out


@pytest.fixture
def command(here: Path) -> Callable[..., str]:
    """Runs the command in its own process, as a user does (but for importing torch)."""

    def run(*arguments: str) -> str:
        done = Script("from coda_inductor import cli\nraise SystemExit(cli.main())", *arguments, cwd=here).done()
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.sampled
@pytest.mark.parametrize(("mode", "kind"), [("infer", "inference"), ("train", "joint")])
def test_explain_a_real_model(command: Callable[..., str], mode: str, kind: str) -> None:
    report = json.loads(command("explain", "their_model:build", "--mode", mode, "--json"))
    assert report["schema"] == 1
    assert [graph["kind"] for graph in report["graphs"]] == [kind]


def test_explain_a_real_model_as_text(command: Callable[..., str]) -> None:
    assert "graph 0 (inference)" in command("explain", "their_model:build")


def test_graph_of_a_real_model(command: Callable[..., str]) -> None:
    facts = json.loads(command("graph", "their_model:build", "--json", "--target", "reference"))
    (graph,) = facts["graphs"]
    assert facts["schema"] == 1 and graph["before"] != graph["after"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "reference"], "y0 f32[4, 16] -> [1] = "),
        (["--before"], "[1] pass t=1.2"),
        ([], "left untouched: its products are of float32"),
        (["--mode", "train", "--target", "reference"], "gemm t="),
    ],
)
def test_graph_of_a_real_model_as_text(command: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in command("graph", "their_model:build", *arguments)


def test_a_reader_that_stops_is_no_error() -> None:
    """As `| head`."""
    command = [sys.executable, "-m", "coda_inductor.cli", "rules"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "BrokenPipe" not in process.stderr.read()
    assert process.returncode == 0
