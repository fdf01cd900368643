"""rules: every law is listed and proved, and a name that is none is said by every verb."""

from __future__ import annotations

import dataclasses

import pytest
from asking import Ask
from asking import ask as ask
from asking import folder as folder

from coda_inductor.commands import rules
from coda_inductor.core.settings import Settings
from coda_inductor.rewrite.laws import BILINEARITY, LAWS, Law


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_law_is_listed_and_proved(law: Law) -> None:
    facts = rules.law_facts(law, Settings(), prove=True)
    assert facts["proof"]["verdict"] == "proved" and facts["used"]
    assert facts["before"] and facts["after"] and facts["default"] == {"strict": False, "default": True, "fast": True}


def test_a_false_law_and_a_loose_one_are_noticed() -> None:
    false = dataclasses.replace(BILINEARITY, after=lambda x, r, v, g, w: (x @ w) * r + v * g @ w * r)
    assert rules.proof(false)["verdict"].startswith("false for ")
    loose = dataclasses.replace(BILINEARITY, refuses=(BILINEARITY.shapes,))
    assert rules.proof(loose)["verdict"].startswith("true also for the refused ")


def test_rules_as_text(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", "shift,pair,tables")
    status, said, _ = ask("rules", "--prove")
    assert status == 0 and said.count("proved in ") == len(LAWS)
    assert "    (x * r + v * g) @ w\n  = (x @ w) * r + v * (g @ w)\n" in said
    off = [line for line in said.splitlines() if "switched off" in line]
    assert [line.split()[0] for line in off] == ["shift", "pair", "tables"]


VERBS = [["doctor"], ["rules"], ["kernels"], ["cache", "ls"], ["explain", "tests.coverage_models:nanogpt"]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_name_that_does_not_exist_is_said(ask: Ask, monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_ONLY", "table")
    status, _, said = ask(*verb)
    assert status and "unknown law, region kind or pass 'table' (did you mean 'tables'?)" in said
