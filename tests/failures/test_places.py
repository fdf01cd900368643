"""Where a warning says that it comes from: the user's line, whatever stands between that line and ours."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from compiling import half, streams
from pretended_machine import pretended as pretended
from processes import python

from coda_inductor.core.errors import CodaWarning, warn
from coda_inductor.core.place import ENTRY, users

# ---- scripts

MODEL = """
import torch

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        h = self.up(x)
        torch._dynamo.graph_break()
        return self.down(h)
"""

SCRIPT = """
import os, torch, warnings
from model import Layer

warnings.simplefilter(os.environ.get("ACTION", "default"), RuntimeWarning)
model = torch.compile(Layer(), backend="coda", options={"tune": "full"})  # 1
torch.compile(model)
for tokens in 64, 128:
    x = torch.randn(tokens, 32)
    model(x)  # 2
    model(x)
print("done")
"""


def lines(text: str) -> dict[str, int]:
    """The number of each line that ends with a marked comment."""
    return {line.rpartition("  # ")[2]: i for i, line in enumerate(text.splitlines(), 1) if "  # " in line}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program of two files, as a user has it."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def ran(script: Path, **environment: str) -> tuple[str, list[str]]:
    """What a process that runs the script prints, and the lines of its errors. Nothing comes from a cache."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
    uncached = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = python(code, str(script), str(script.parent), **uncached, **environment)
    return done.stdout, done.stderr.splitlines()


def test_a_script_is_told_its_own_lines_once(script: Path) -> None:
    """A value that is none any more, a setting of the environment, and a machine without kernels. The model lies in a
    file of its own and its graph is broken in two: the line is the script's."""
    out, said = ran(script, CODA_INDUCTOR_DISABLE="sweeps", CODA_INDUCTOR_TARGET="auto", CUDA_VISIBLE_DEVICES="")
    at, text = lines(SCRIPT), SCRIPT.splitlines()
    ours = [i for i, line in enumerate(said) if "CodaWarning" in line]
    wanted = [(at["1"], "there are no sweeps"), (at["2"], "'full' is no value"), (at["2"], "left to Inductor")]
    assert out == "done\n" and len(ours) == len(wanted), said
    for i, (number, what) in zip(ours, wanted, strict=True):
        assert said[i].startswith(f"{script}:{number}: CodaWarning: coda_inductor: ") and what in said[i]
        assert said[i + 1].strip() == text[number - 1].strip()  # Python quotes the line below


def test_warnings_as_errors_end_the_script_at_that_line(script: Path) -> None:
    out, said = ran(script, ACTION="error", CUDA_VISIBLE_DEVICES="")
    assert out == "" and any(f'File "{script}", line {lines(SCRIPT)["2"]}, in <module>' in line for line in said), said
    assert any("CodaWarning: coda_inductor: option 'tune'" in line for line in said), said


def test_what_is_said_of_a_call_stands_at_the_call(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph runs, its kernels are called by code that Inductor generated, and that by the model's forward."""
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, (a, r) = half(torch.bfloat16), streams(torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="coda", dynamic=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.nn.functional.pad(a, (1, 0))[:, 1:], r)  # the call
    (told,) = [w for w in caught if w.category is CodaWarning]
    assert "an input was copied" in str(told.message)
    assert (told.filename, told.lineno) == (__file__, lines(Path(__file__).read_text())["the call"])


# ---- frames

USER, SITE = "/home/me/train.py", "/venv/lib/python3.11/site-packages"
CALLED = (USER, "train", "main")
TORCH = (f"{SITE}/torch/nn/modules/module.py", "torch.nn.modules.module", "_call_impl")
COMPILED = (f"{SITE}/torch/_dynamo/eval_frame.py", *ENTRY)
LAYER = ("/home/me/layers.py", "layers", "forward")
GENERATED = ("/tmp/torchinductor_me/ab/cab.py", "torch._inductor.runtime.compile_tasks.cab", "call")
OURS = ("/home/me/src/coda-inductor/coda_inductor/backend.py", "coda_inductor.backend", "prepared")
TRAINER = (f"{SITE}/transformers/trainer.py", "transformers.trainer", "train")
RUNPY = ("<frozen runpy>", "runpy", "_run_code")
TRACED = ("<eval_with_key>.3", "", "forward")
CELL = ("<stdin>", "__main__", "<module>")
SOURCE = ("/home/me/pytorch/torch/nn/modules/module.py", "torch.nn.modules.module", "_call_impl")
Call = tuple[str, str, str]


def found_in(calls: Sequence[Call]) -> FrameType | None:
    """What `users` finds from the last of calls, the outermost first, each of (file, module, function), on a thread of
    their own: tests are no part of the program."""
    found = list[FrameType | None]()
    inner: Any = None
    called = "found.append(users(sys._getframe()))"
    for file, module, name in reversed(calls):
        world: dict[str, Any] = {"__name__": module, "inner": inner, "found": found, "users": users, "sys": sys}
        exec(compile(f"def f(): {called}\n", file, "exec"), world)
        inner, called = world["f"], "inner()"
        inner.__code__ = inner.__code__.replace(co_name=name)
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("calls", "which"),
    [
        ([CALLED, TORCH, OURS], CALLED),
        ([CALLED, SOURCE, OURS], CALLED),
        ([CALLED, COMPILED, LAYER, GENERATED, OURS], CALLED),
        ([CALLED, LAYER, COMPILED, TORCH, OURS], LAYER),
        ([CALLED, COMPILED, LAYER, COMPILED, LAYER, GENERATED, OURS], LAYER),
        ([RUNPY, CALLED, TRAINER, COMPILED, LAYER, OURS], CALLED),
        ([RUNPY, TRAINER, COMPILED, LAYER, OURS], TRAINER),
        ([CELL, COMPILED, TRACED, OURS], CELL),
        ([CALLED, COMPILED, TRACED, OURS], CALLED),
        ([COMPILED, GENERATED, OURS], None),
    ],
    ids=["module", "torch of sources", "compiled", "eager model of compiled layers", "compiled within compiled",
         "trainer", "program that is installed", "typed in", "traced", "thread"],
)  # fmt: skip
def test_the_users_frame(calls: Sequence[Call], which: Call | None) -> None:
    found = found_in(calls)
    assert (found and (found.f_code.co_filename, found.f_globals["__name__"])) == (which and which[:2])


def test_a_thread_is_said_where_the_main_thread_waits() -> None:
    """As autograd's thread of a GPU, on which a backward graph runs, while the script stands in `backward`."""
    begun = threading.Event()
    world: dict[str, Any] = {
        "__name__": "coda_inductor.kernels.launch",
        "begun": begun,
        "sleep": time.sleep,
        "warn": warn,
    }
    exec("def launched():\n begun.wait()\n sleep(0.1)\n warn('of a thread')", world)
    thread = threading.Thread(target=world["launched"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        begun.set()
        thread.join()  # the wait
    (told,) = caught
    assert (told.filename, told.lineno) == (__file__, lines(Path(__file__).read_text())["the wait"])
