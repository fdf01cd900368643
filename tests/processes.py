"""Scripts in processes of their own: `fresh`, as a user starts Python, or forked from a process that has imported
torch's compiler and nothing of ours. That import is most of what such a script does, 5 s."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._inductor.compile_fx", "pytest"])


def search(package: Path = HERE.parent) -> dict[str, str]:
    """The variable by which Python finds the `package` in that folder, and this folder."""
    return {"PYTHONPATH": os.pathsep.join([str(package), str(HERE), os.environ.get("PYTHONPATH", "")])}


def fresh(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> CompletedProcess[str]:
    """Runs a script in an interpreter of its own, with what it reads from the environment when it starts or imports."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd, env={**os.environ, **search(), **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


class Script:
    """Python `code` that runs in a fork, where it finds this folder and the `package` in that one.

    They share a seed of hashes, addresses and torch's settings with the process from which they are forked:
    PYTHONHASHSEED, TORCH_LOGS and Inductor's variables say nothing to them. atexit's functions do not run.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        package: Path = HERE.parent,
        cwd: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.said = tempfile.TemporaryDirectory()
        self.streams = [Path(self.said.name) / name for name in ("out", "err")]
        for stream in self.streams:
            stream.touch()
        environment = {**os.environ, **search(package), **environment}
        given = code, arguments, environment, cwd or Path.cwd(), self.streams
        self.process = SERVER.Process(target=_script, args=given, daemon=True)  # not waited for if a test has failed
        self.process.start()

    def done(self, timeout: float = 300) -> CompletedProcess[str]:
        """Waits for its end; after `timeout` seconds kills it and raises TimeoutExpired with what it has said."""
        self.process.join(timeout)
        if late := self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        out, err = (stream.read_text() for stream in self.streams)
        self.said.cleanup()
        if late:
            raise subprocess.TimeoutExpired("python", timeout, out, err)
        assert self.process.exitcode is not None
        return CompletedProcess(("python",), self.process.exitcode, out, err)


def python(code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """Runs a script in a fork to its end."""
    return Script(code, *arguments, environment=environment).done()


def _script(code: str, arguments: tuple[str, ...], environment: dict[str, str], cwd: Path, streams: list[Path]) -> None:
    for descriptor, stream in zip((1, 2), streams, strict=True):
        with stream.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)[:2]
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def said_by_ranks(module: str, ranks: int, place: Path, *more: str) -> list[dict[str, Any]]:
    """The lines of JSON that `main(rank, place, *more)` of a module beside this one prints, of each rank, at the same
    time, on the reference target; what it says of itself is printed here."""
    code = f"import sys, {module}; {module}.main(int(sys.argv[1]), *sys.argv[2:])"
    settings = {"CODA_INDUCTOR_TARGET": "reference", "CODA_INDUCTOR_STRICT": "1"}
    scripts = [Script(code, str(rank), str(place), *more, environment=settings) for rank in range(ranks)]
    found = list[dict[str, Any]]()
    for script in scripts:
        ended = script.done()
        found += [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        print(ended.stderr[-3000:], file=sys.stderr)
    return found
