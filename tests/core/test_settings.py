"""Settings: the environment sets, options override, what is unknown or not allowed is said."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from processes import python

from coda_inductor.core import errors
from coda_inductor.core.errors import CodaError, CodaWarning
from coda_inductor.core.settings import KINDS, VARIABLES, SettingError, Settings, default_cache
from coda_inductor.passes import switches
from coda_inductor.passes.switches import allowed

DESIGNED = {"", "_DISABLE", "_ONLY", "_NUMERICS", "_CHUNK", "_TUNE", "_TARGET", "_CACHE_DIR", "_DEBUG_DIR", "_STRICT"}
DESIGNED |= {"_CACHE_LIMIT", "_HINTS"}


def test_names_are_the_designed_ones() -> None:
    assert set(VARIABLES) == {f"CODA_INDUCTOR{v}" for v in DESIGNED}
    assert [*KINDS, "deterministic"] == [f.name for f in dataclasses.fields(Settings)]  # which torch has a switch for


def test_empty_environment_gives_the_defaults() -> None:
    assert Settings.read({}) == (Settings(), {})
    assert Settings.read({"CODA_INDUCTOR_STRICT": "", "CODA_OTHER": "x", "PATH": "y"}) == (Settings(), {})


def test_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    assert Settings.read()[0].tune == "off"


VALUES: list[tuple[str, Any, Any]] = [
    ("enabled", "0", False),
    ("enabled", "1", True),
    ("enabled", False, False),
    ("disable", "row_scale, rope,", frozenset({"row_scale", "rope"})),
    ("disable", ["row_scale", "rope"], frozenset({"row_scale", "rope"})),
    ("only", "row_scale", frozenset({"row_scale"})),
    ("only", (), frozenset()),
    ("strict", "1", True),
    ("chunk", "512", 512),
    ("chunk", 1, 1),
    ("cache_limit", "0", 0),
    ("cache_limit", 25, 25),
    ("hints", "0", False),
    ("cache_dir", "/a/../b", "/b"),
    ("cache_dir", Path("/b"), "/b"),
    ("debug_dir", "~/b", str(Path.home() / "b")),
    ("debug_dir", None, None),
    *((name, c, c) for name, type_ in get_type_hints(Settings).items() for c in get_args(type_) if isinstance(c, str)),
]


@pytest.mark.parametrize(("name", "given", "expected"), VALUES)
def test_value(name: str, given: Any, expected: Any) -> None:
    assert getattr(Settings.read({}, {name: given})[0], name) == expected
    if isinstance(given, str):
        variable = next(v for v, n in VARIABLES.items() if n == name)
        assert getattr(Settings.read({variable: given})[0], name) == expected


@pytest.mark.parametrize(("name", "given", "meant"), [("tune", "full", "quick")])
def test_a_retired_value_warns_and_is_what_it_was(
    name: str, given: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "said", set())
    with pytest.warns(CodaWarning, match=f"option '{name}': '{given}' is no value any more"):
        assert getattr(Settings.read({}, {name: given})[0], name) == meant


def test_a_retired_pass_warns_and_nothing_else_is_used() -> None:
    """Who asks for "sweeps" alone gets nothing."""
    errors.said.clear()
    only = Settings(only=frozenset({"sweeps"}))
    with pytest.warns(CodaWarning, match="there are no sweeps any more"):
        only.check_kinds(switches.NAMES)
    assert not any(switches.allowed(kind, switches.REGION_KINDS, only) for kind in switches.REGION_KINDS)
    assert switches.allowed("pair", switches.REGION_KINDS, Settings(disable=frozenset({"sweeps"})))


def test_options_override_the_environment() -> None:
    environ = {"CODA_INDUCTOR_NUMERICS": "default", "CODA_INDUCTOR_TUNE": "off"}
    settings, _ = Settings.read(environ, {"numerics": "strict"})
    assert (settings.numerics, settings.tune) == ("strict", "off")


def test_inductor_options_are_passed_on() -> None:
    options = {"inductor.max_autotune": True, "inductor.triton.cudagraphs": False, "tune": "off"}
    assert Settings.read({}, options) == (Settings(tune="off"), {"max_autotune": True, "triton.cudagraphs": False})


ERRORS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"CODA_INDUCTOR_TUNES": "off"}, {}, "did you mean 'CODA_INDUCTOR_TUNE'"),
    ({"CODA_INDUCTR": "0"}, {}, "did you mean 'CODA_INDUCTOR'"),
    ({"CODA_INDUCTR_TUNE": "off"}, {}, "did you mean 'CODA_INDUCTOR_TUNE'"),
    ({"CODA_INDUCTOR_AUTOTUNE": "off"}, {}, "did you mean 'CODA_INDUCTOR_TUNE'"),
    ({"CODA_INDUCTOR_ENABLED": "0"}, {}, "did you mean 'CODA_INDUCTOR'?"),
    ({}, {"numeric": "fast"}, "did you mean 'numerics'"),
    ({}, {"NUMERICS": "fast"}, "known: cache_dir, cache_limit, chunk, debug_dir, disable, enabled"),
    ({}, {"epilogue_fusion": True}, "'inductor.epilogue_fusion'"),
    ({"CODA_INDUCTOR_TUNE": "fast"}, {}, "CODA_INDUCTOR_TUNE: 'fast' is not allowed (allowed: off, quick)"),
    ({"CODA_INDUCTOR": "yes"}, {}, "'yes' is not allowed (allowed: 0 or 1)"),
    ({}, {"strict": 2}, "option 'strict': 2 is not allowed"),
    ({}, {"chunk": 0}, "allowed: a whole number, 1 or more"),
    ({}, {"chunk": 1.5}, "allowed: a whole number, 1 or more"),
    ({"CODA_INDUCTOR_CHUNK": "many"}, {}, "allowed: a whole number, 1 or more"),
    ({}, {"cache_limit": -1}, "allowed: a whole number, 0 or more"),
    ({}, {"cache_limit": 1.5}, "allowed: a whole number, 0 or more"),
    ({}, {"numerics": None}, "allowed: strict, default, fast"),
    ({}, {"target": "sm_70"}, "allowed: auto, sm_90a, sm_100a, sm_103a, sm_120a, reference"),
    ({}, {"disable": 3}, "allowed: names separated by commas"),
    ({}, {"only": [3]}, "allowed: names separated by commas"),
    ({}, {"cache_dir": 3}, "allowed: a path"),
]


@pytest.mark.parametrize(("environ", "options", "said"), ERRORS)
def test_error_says_what_is_allowed(environ: dict[str, str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.read(environ, options)
    assert said in str(caught.value)
    assert isinstance(caught.value, CodaError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Settings)])
def test_key_holds_everything_but_the_folders(field: str) -> None:
    other: dict[str, Any] = {
        "enabled": False,
        "disable": frozenset("a"),
        "only": frozenset("a"),
        "numerics": "strict",
        "chunk": 3,
        "tune": "off",
        "target": "reference",
        "cache_dir": "/a",
        "cache_limit": 3,
        "hints": False,
        "debug_dir": "/a",
        "strict": True,
        "deterministic": True,
    }
    changed = dataclasses.replace(Settings(), **{field: other[field]})
    assert (hash(changed.key()) == hash(Settings().key())) == (changed.key() == Settings().key())
    assert (changed.key() == Settings().key()) == field.startswith(("cache_", "debug_"))
    assert pickle.loads(pickle.dumps(changed)) == changed


def test_key_is_the_same_in_every_process() -> None:
    code = "from coda_inductor.core.settings import Settings; print(Settings(disable=frozenset('abcdefgh')).key())"
    keys = {subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": s}) for s in "12"}
    assert keys == {f"{Settings(disable=frozenset('abcdefgh')).key()}\n".encode()}


def test_only_restricts_the_laws_or_the_kinds_that_it_names() -> None:
    laws, kinds = frozenset({"gauge", "shift"}), frozenset({"pair"})
    assert allowed("gauge", laws, Settings())
    assert not allowed("gauge", laws, Settings(disable=frozenset({"gauge"})))
    only = Settings(only=frozenset({"gauge"}))
    assert allowed("gauge", laws, only) and not allowed("shift", laws, only) and allowed("pair", kinds, only)


def test_check_kinds_says_where_the_name_stood() -> None:
    for option in ("only", "disable"):
        with pytest.raises(SettingError, match=f"option '{option}': unknown law, region kind or pass 'foo'"):
            Settings(**{option: frozenset({"foo"})}).check_kinds(["triangle", "adjoint"])  # type: ignore[arg-type]


def test_check_kinds_suggests_the_nearest() -> None:
    Settings(disable=frozenset({"triangle"})).check_kinds(["triangle", "adjoint"])
    with pytest.raises(SettingError, match="did you mean 'triangle'"):
        Settings(only=frozenset({"triangel"})).check_kinds(["triangle", "adjoint"])


@pytest.mark.parametrize("variable", ["CODA_INDUCTOR_DISABLE", "CODA_INDUCTOR_ONLY"])
def test_a_wrong_law_is_said_where_torch_compile_is_called(variable: str) -> None:
    code = "import torch; torch.compile(lambda x: x, backend='coda')"
    said = python(code, **{variable: "gauge,triangel"})
    assert said.returncode == 1 and "did you mean 'triangle'" in said.stderr


def test_default_cache_is_in_the_users_cache() -> None:
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == "/c/coda_inductor"
    assert default_cache({}) == default_cache({"XDG_CACHE_HOME": ""}) == str(Path.home() / ".cache/coda_inductor")
