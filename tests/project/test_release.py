"""What is given away: the sdist and the wheel, their types, the project's address, and what is asked of who reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from coda_inductor import __version__
from coda_inductor.core import project, versions
from coda_inductor.core.errors import BUG
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ADDED = ("PKG-INFO", "setup.cfg", "coda_inductor.egg-info/")
"""What setuptools puts into an sdist."""
PLANTED = ("coda_inductor/tuning/planted/hints.json", "coda_inductor/planted.html")
"""Data that the tests put into the package, in a folder of its own and beside the modules."""
MADE = {"__pycache__", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build", "dist"}
"""What lies in an unpacked sdist once it was worked in."""


def repository() -> list[str]:
    """The files of this clone, or of this sdist."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(name for name in names if name and (ROOT / name).is_file())
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(p) for p in found if not {*p.parts} & MADE and not str(p).startswith(ADDED))


@dataclass(frozen=True, slots=True)
class Built:
    """Both forms, as files and as unpacked folders."""

    sdist: Path
    wheel: Path
    folder: Path

    def names(self) -> tuple[set[str], set[str]]:
        """The names of files in the sdist and in the wheel."""
        with tarfile.open(self.sdist) as tar:
            source = {str(PurePosixPath(*PurePosixPath(m.name).parts[1:])) for m in tar.getmembers() if m.isfile()}
        with zipfile.ZipFile(self.wheel) as archive:
            return source, set(archive.namelist())

    def site(self) -> tuple[Path, Path]:
        """A virtual environment with the wheel in it and nothing else: its Python, and where packages lie."""
        place = self.folder / "venv"
        if not place.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        (packages,) = place.glob("lib/python*/site-packages")
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(packages)
        return place / "bin" / "python", packages


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """By setuptools as it is installed here, from a copy with PLANTED in it."""
    folder = tmp_path_factory.mktemp("release")
    copy = folder / "copy"
    for name in repository():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for name in PLANTED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("planted")
    code = "import setuptools.build_meta as b; print(); print(b.build_sdist('..')); print(b.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, sdist, wheel = [line for line in done.stdout.splitlines() if line.endswith((".tar.gz", ".whl"))]
    return Built(folder / sdist, folder / wheel, folder)


# ---- what is in them


def test_the_sdist_is_the_repository(built: Built) -> None:
    source, _ = built.names()
    assert {name for name in source if not name.startswith(ADDED)} == {*repository(), *PLANTED}
    assert {"dev", ".ci/run", "tests/conftest.py", "SECURITY.md", ".github/workflows/cpu.yml"} <= source


def test_the_wheel_is_the_package_with_its_data(built: Built) -> None:
    _, wheel = built.names()
    facts = {name for name in wheel if ".dist-info/" in name}
    assert wheel - facts == {n for n in (*repository(), *PLANTED) if n.startswith("coda_inductor/")}
    assert "coda_inductor/py.typed" in wheel and f"coda_inductor-{__version__}-py3" in built.wheel.name


USER = """
import coda_inductor
from coda_inductor.backend import coda
from coda_inductor.core.settings import Settings

strict: Settings = Settings(numerics="strict")
text: str = strict.numerics
number: int = strict.numerics  # assignment
slow = Settings(numerics="slow")  # arg-type
name: str = coda.__name__
report: int = coda_inductor.explain.explain(print, (), {}, "infer", strict)  # assignment
"""


def test_types_reach_a_user(built: Built, tmp_path: Path) -> None:
    """Of a wheel that is installed: mypy reads the types of such a package only if it has a py.typed."""
    python, _ = built.site()
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "none.ini").write_text("[mypy]\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py"]
    command += ["--config-file", "none.ini", "--cache-dir", str(tmp_path / "cache")]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    found = [(int(line), kind) for line, kind in re.findall(r"user\.py:(\d+): error: .*\[([\w-]+)\]", said)]
    wanted = [(i, line.partition("  # ")[2]) for i, line in enumerate(USER.splitlines(), 1) if "  # " in line]
    assert found == wanted, said


@pytest.mark.slow
def test_tests_of_the_sdist_collect(built: Built, tmp_path: Path) -> None:
    """Unpacked, with this environment's packages and nothing of this clone."""
    with tarfile.open(built.sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment(folder))
    assert done.returncode == 0, done.stdout[-2000:]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == {name for name in repository() if re.match(r"tests/.*/test_\w+\.py$", name)}


def environment(*search: Path) -> dict[str, str]:
    """This process's, with only `search` on Python's path."""
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    return {**left, "PYTHONPATH": os.pathsep.join(map(str, search)), "PYTHONDONTWRITEBYTECODE": "1"}


RUN = """
import sys, torch, coda_inductor
linear = torch.nn.Linear(64, 64, dtype=torch.float64)
x = torch.randn(8, 64, dtype=torch.float64)
wanted = torch.relu(linear(x)) * 2
found = torch.compile(lambda x: torch.relu(linear(x)) * 2, backend="coda", options={"target": "reference"})(x)
torch.testing.assert_close(found, wanted)
from coda_inductor.inductor.joint_pass import REPORTS
print(coda_inductor.__file__, len(REPORTS[-1].sites), "coda" in torch._dynamo.list_backends())
"""


@pytest.mark.slow
def test_a_wheel_runs_from_outside_of_the_clone(built: Built, tmp_path: Path) -> None:
    """torch finds the backend by its name, and a Region is derived. torch and the other packages are those that are
    here; that pip finds them is tried by hand."""
    python, packages = built.site()
    outside = environment(packages, *(Path(p) for p in sys.path if p.endswith("-packages")))

    def said(code: str) -> str:
        command = [str(python), "-c", code]
        ran = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert said(RUN).split() == [str(packages / "coda_inductor" / "__init__.py"), "1", "True"]
    doctor = json.loads(said("from coda_inductor.cli import main; main(['doctor', '--json'])"))
    assert doctor["versions"]["coda-inductor"] == __version__ and doctor["torch"]["works"]


# ---- the address


def test_the_address_is_said_in_one_place() -> None:
    """pyproject.toml cannot ask Python for it: this compares."""
    wanted = project.urls()
    section = "\n".join(["[project.urls]", *(f'{name} = "{url}"' for name, url in wanted.items())])
    assert PYPROJECT["project"].get("urls", {}) == wanted, f"pyproject.toml is to have:\n{section if wanted else ''}"


def test_without_an_address_there_is_no_link(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (facts,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        assert archive.read(facts).decode().count("\nProject-URL: ") == len(project.urls())
    assert ("please report it at https://" in BUG) == ("http" in BUG) == bool(project.ADDRESS)
    assert project.at("Issues", "") == "" and project.urls("") == {}
    assert project.at("Issues", "https://host/me/it") == " at https://host/me/it/issues"


# ---- what the forms ask


def test_the_changelog_and_security_are_of_this_version() -> None:
    newest = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1].rstrip(",") == __version__.split(".dev")[0]
    assert ("not released" in newest[2]) == (".dev" in __version__)
    assert ("no address" in (ROOT / "SECURITY.md").read_text()) == (not project.ADDRESS)


def test_the_form_asks_for_what_finds_a_problem() -> None:
    """Every field of text is required, but the last; what it names exists."""
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text())
    assert form["name"] and form["description"]
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    needed = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert needed == {"kind", "happened", "program", "results", "doctor", "explain"} and {*fields} - needed == {"more"}
    assert fields["doctor"]["attributes"]["label"] == "coda-inductor doctor --json"
    rows = fields["results"]["attributes"]["value"]
    assert all(f"| {backend} |" in rows for backend in ("eager", "inductor", "coda"))
    world: dict[str, Any] = {"__name__": "user"}
    example = fields["program"]["attributes"]["placeholder"].replace('device="cuda"', 'device="meta"')
    exec(compile(example, "problem.yml", "exec"), world)
    model, args = world["build"]()
    assert explain(model, args, {}, "infer", Settings(target="sm_90a"))["schema"] == 1


def test_the_workflow_tests_what_was_promised() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "cpu.yml").read_text())["jobs"]
    tried = [row["torch"] for row in jobs["tests"]["strategy"]["matrix"]["include"]]
    assert tried == [".".join(map(str, release)) for release in versions.TORCH]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in runs and "./dev test" in runs
    named = [word for run in runs for word in run.split() if word.startswith((".ci/", "./", "tests/"))]
    assert all((ROOT / name).exists() for name in named) and len(named) >= 4
