"""The rules of the house, read off the source: who may import whom, who reads the environment, how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coda_inductor.codegen.target import TARGETS, arch

PACKAGE = Path(__file__).resolve().parents[2] / "coda_inductor"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = PACKAGE.parent / "tests"

TOWER = (
    "core", "patterns", "rewrite", "codegen", "plan", "kernels", "measure", "ops", "schedule", "write", "attention",
    "passes", "parts", "loss", "tuning", "inductor", "explain", "backend", "commands", "demo", "cli",
)  # fmt: skip
"""The rooms and the files beside them, from the ground up: each imports only from itself and from below."""
ROOM_FILES = 16

RETIRED = frozenset({
    "Contest", "BareContest", "SweepContest", "Judges", "Lying", "Sweep", "Swept", "Trials", "Verdict", "Without",
    "bare", "bare_contest",
    "bare_products", "contest", "is_bare", "judge", "judges", "lies", "lying", "lying_as",
    "only_summed", "read_bare", "rehearsal", "rehearse", "slower_bare", "sweep_contest", "sweeps", "swept", "trials",
    "unhalved", "unsummed", "without", "write_bare",
})  # fmt: skip
"""Names of classes, functions, fields and modules that the glossary's have replaced (docs/architecture.md)."""

LATE_IMPORTS: dict[str, str] = {
    "__init__.py": "importing the package must not import torch",
    "backend.py": "a name that torch has no longer must not end torch.compile",
    "commands/doctor.py": "the same name is what it is to say",
    "cli.py": "--help, --version and usage errors answer before torch is loaded",
}
"""Files that may import our own modules inside a function, each with the reason. What makes kernels may do so once."""

MAKERS = ("codegen/", "kernels/", "measure/")
ONLY_IN: dict[str, tuple[str, ...]] = {
    "quack": MAKERS,
    "cutlass": MAKERS,
    "triton": MAKERS,
    "cuda": MAKERS,
}
"""Third-party modules to the only places that may import them."""

NEVER_IN: dict[str, tuple[str, ...]] = {
    "torch.fx": ("core/", *MAKERS),
    "torch._dynamo": ("core/", "patterns/", "rewrite/", "plan/", *MAKERS),
    "torch._inductor": ("core/", "patterns/", "rewrite/", "plan/"),
}
"""Modules to the layers that may not import them."""

ARCHS = {arch(row.capability): str(row.capability) for row in TARGETS.values()}
MACHINES = {word for name, pair in ARCHS.items() for word in (name, name.upper().replace("_", ""), pair)}
OF_MACHINES = ("codegen/target.py", "core/settings.py")
"""sm_90, SM90 and (9, 0), and the only files that may hold them, but for comments and docstrings."""

BY_NAME = ("import_module", "__import__", "behind")
"""Functions that import the module that they are given."""

FILE_LINES, FUNCTION_LINES = 400, 60

each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def layer(module: str) -> str:
    """core of coda_inductor.core.ops, backend of coda_inductor.backend, nothing of coda_inductor."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(module, late) for each import, also by `import_module("...")` and its like; late: in a function."""
    late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for n in ast.walk(f)}
    for node in ast.walk(tree):
        inside = id(node) in late
        match node:
            case ast.Import(names):
                yield from ((alias.name, inside) for alias in names)
            case ast.ImportFrom(module, names, 0) if module:
                package = PACKAGE.parent.joinpath(*module.split("."))
                for alias in names:  # `from coda_inductor.core import ops` imports a module, not a name
                    is_module = package.joinpath(f"{alias.name}.py").exists() or module == "torch"
                    yield f"{module}.{alias.name}" if is_module else module, inside
            case ast.ImportFrom(level=level) if level:
                yield "relative", inside
            case ast.Call(func, [ast.Constant(str(module)), *_]) if _name(func) in BY_NAME:
                yield module, inside


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def inside(module: str, of: str) -> bool:
    return module == of or module.startswith(f"{of}.")


def complaints(name: str, source: str) -> list[str]:
    """What the file `name` (relative to the package) with this source does that it must not."""
    tree, found = ast.parse(source), []
    mine = name.split("/")[0].removesuffix(".py")
    late = 0
    for module, is_late in imports(tree):
        if module == "relative":
            found.append("relative import")
        if inside(module, "coda_inductor"):
            room = layer(module) or "backend"  # the package's own names load what they stand for
            if mine in TOWER and TOWER.index(room) > TOWER.index(mine):
                found.append(f"imports {module}")
            late += is_late
        found += [f"imports {module}" for m, ok in ONLY_IN.items() if inside(module, m) and not name.startswith(ok)]
        found += [f"imports {module}" for m, bad in NEVER_IN.items() if inside(module, m) and name.startswith(bad)]
    if late and name not in LATE_IMPORTS and f"{mine}/" not in MAKERS:
        found.append("imports our own package inside a function")
    if name != "core/settings.py":
        reads = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and _name(n) in ("environ", "getenv")]
        found += [f"line {n.lineno}: reads the environment" for n in reads]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name} has {lines} lines, limit {FUNCTION_LINES}"] * (lines > FUNCTION_LINES)
    if name not in OF_MACHINES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                node.value = ast.Constant(None)
        found += [f"holds {word}, a fact of a target" for word in sorted(MACHINES) if word in ast.unparse(tree)]
    lines = source.count("\n")
    return found + [f"{lines} lines, limit {FILE_LINES}"] * (lines > FILE_LINES)


@each_file
def test_file_keeps_the_rules(path: Path) -> None:
    assert complaints(relative(path), path.read_text()) == []


def test_kernels_are_imported_late_once() -> None:
    """Kernels must be importable without the libraries that make them, through a single door."""
    doors = [
        f"{relative(path)}: {module}"
        for path in FILES
        if relative(path).startswith(MAKERS)
        for module, late in imports(ast.parse(path.read_text()))
        if late and inside(module, "coda_inductor")
    ]
    assert len(doors) <= 1, doors


def test_no_circle() -> None:
    """No module needs another that needs it, by whatever way."""
    names = {f"coda_inductor.{relative(p)[:-3].replace('/', '.')}".removesuffix(".__init__"): p for p in FILES}
    needs = {
        name: {m for m, late in imports(ast.parse(p.read_text())) if not late} & names.keys()
        for name, p in names.items()
    }
    left = dict(needs)
    while free := [name for name, below in left.items() if not below & left.keys() - {name}]:
        for name in free:
            del left[name]
    assert not left, f"each of these needs another of them: {sorted(left)}"


@pytest.mark.parametrize("room", sorted({p.parent for p in FILES}), ids=lambda p: p.name)
def test_a_room_is_small(room: Path) -> None:
    assert len([*room.glob("*.py")]) <= ROOM_FILES


@pytest.mark.parametrize("folder", sorted({p.parent for p in TESTS.rglob("*.py")}), ids=lambda p: p.name)
def test_a_folder_of_tests_is_small(folder: Path) -> None:
    """Its files are, too. tests/ itself holds what its folders share."""
    files = [*folder.glob("*.py")]
    assert folder == TESTS or len(files) <= ROOM_FILES
    assert [p.name for p in files if p.read_text().count("\n") > FILE_LINES] == []


def test_the_tower_names_what_there_is() -> None:
    assert {relative(p).split("/")[0].removesuffix(".py") for p in FILES} - {"__init__"} == {*TOWER}


@each_file
def test_retired_names_are_not_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)} | {path.stem}
    defined |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not defined & RETIRED


def test_allow_list_is_not_longer_than_needed() -> None:
    for name in LATE_IMPORTS:
        source = (PACKAGE / name).read_text()
        assert "import_module" in source or any(late for _, late in imports(ast.parse(source))), name


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core/a.py", "import coda_inductor.patterns.terms"),
        ("core/a.py", "from coda_inductor import codegen"),
        ("core/a.py", "from torch import fx"),
        ("core/a.py", "from coda_inductor.backend import coda"),
        ("patterns/a.py", "from coda_inductor.rewrite import laws"),
        ("patterns/a.py", "from coda_inductor.kernels.launch import run"),
        ("patterns/a.py", "from . import terms"),
        ("rewrite/a.py", "from coda_inductor.codegen import tiles"),
        ("plan/a.py", "from coda_inductor.write.emit import emit"),
        ("kernels/a.py", "import torch.fx"),
        ("rewrite/a.py", "import quack.gemm"),
        ("codegen/a.py", "from coda_inductor.plan import plan"),
        ("codegen/a.py", "import torch.fx as fx"),
        ("inductor/a.py", "import coda_inductor.backend"),
        ("inductor/a.py", "import triton"),
        ("inductor/a.py", "def f():\n    import coda_inductor.rewrite.laws"),
        ("inductor/a.py", "def f():\n    importlib.import_module('coda_inductor.rewrite.laws')"),
        ("explain/a.py", "def f():\n    from coda_inductor.core import ops"),
        ("explain/a.py", "def f():\n    behind('coda_inductor.core.ops')"),
        ("explain/a.py", "import os\nx = os.environ.get('CODA_INDUCTOR')"),
        ("explain/a.py", "from os import environ\nx = environ['HOME']"),
        ("explain/a.py", "def f():\n" + "    pass\n" * FUNCTION_LINES),
        ("explain/a.py", "pass\n" * (FILE_LINES + 1)),
        ("explain/a.py", "x = f'{y}sm_90a'"),
        ("kernels/a.py", "x = 9, 0"),
    ],
)
def test_a_planted_offence_is_seen(name: str, source: str) -> None:
    assert complaints(name, source)


def test_import_is_cheap() -> None:
    code = "import sys, coda_inductor, coda_inductor.cli; coda_inductor.__version__; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "coda_inductor.core.settings" in loaded
    assert {"torch", "cutlass", "quack", "triton", "sympy", "numpy"} & set(loaded) == set()


def test_core_does_not_load_the_kernel_libraries() -> None:
    modules = [f"coda_inductor.core.{p.stem}" for p in FILES if p.parent.name == "core" and p.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print(*{{'cutlass', 'quack', 'torch._inductor'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_the_package_loads_its_modules_at_first_use() -> None:
    names = ["coda_inductor.backend", "coda_inductor.explain"]
    code = f"import coda_inductor; print({', '.join(f'{name}.__name__' for name in names)})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split()[-2:] == names


def test_the_package_knows_no_other_names() -> None:
    import coda_inductor

    with pytest.raises(AttributeError, match="no attribute 'bakend'"):
        _ = coda_inductor.bakend
    assert {"backend", "explain"} <= set(dir(coda_inductor))
