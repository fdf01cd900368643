"""Scripts in processes of their own, which are forked from one that has imported torch's compiler and nothing of ours:
that import takes most of what such a script does, 5 s."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType

from quick import quick

HERE = Path(__file__).resolve().parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._inductor.compile_fx", "pytest"])


class Script:
    """Python `code` that runs: it finds this folder and the `package` that lies in that one. (What torch reads from the
    environment when it is imported, was read before: TORCH_LOGS, Inductor's settings.)"""

    def __init__(
        self,
        code: str,
        *arguments: str,
        package: Path = HERE.parent,
        cwd: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.said = tempfile.TemporaryDirectory()
        self.streams = [str(Path(self.said.name) / name) for name in ("out", "err")]
        search = [str(package), str(HERE)]
        path = os.pathsep.join([*search, os.environ.get("PYTHONPATH", "")])  # for what it starts
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        given = code, arguments, environment, cwd or Path.cwd(), search, self.streams
        self.process = SERVER.Process(target=_script, args=given)
        self.process.start()

    def done(self, timeout: float = 300) -> CompletedProcess[str]:
        """Waits for its end, and kills it after `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        out, err = (Path(stream).read_text() for stream in self.streams)
        self.said.cleanup()
        assert self.process.exitcode is not None
        return CompletedProcess(("python",), self.process.exitcode, out, err)


def python(code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """Runs a script to its end."""
    return Script(code, *arguments, environment=environment).done()


def _script(
    code: str, arguments: tuple[str, ...], environment: dict[str, str], cwd: Path, search: list[str], streams: list[str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, stream in zip((1, 2), streams, strict=True):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.path[:0] = search
    sys.argv = ["-c", *arguments]
    quick()
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
