"""What a hint says, and how it is found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from codegen_cases import token_scale
from processes import fresh

from coda_inductor.codegen import target
from coda_inductor.core.region import Let
from coda_inductor.tuning import shipped


def test_what_a_hint_says_holds_within_the_noise() -> None:
    won, lost = shipped.Expected(True, 1.2), shipped.Expected(False, 0.8)
    assert won.holds([1.0, 1.2]) and won.holds([1.0, 1.17]) and not won.holds([1.0, 1.16])
    assert lost.holds([1.0, 0.8]) and not lost.holds([1.0, 0.77]) and not lost.holds([1.0, 1.2])
    assert not won.holds([math.nan, 1.0]) and not lost.holds([math.nan, 1.0])


def test_a_structure_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process with another seed of hashes, and with other versions; constants are no part of it, but widths
    and dtypes are."""
    region = token_scale(64, 64)
    monkeypatch.setattr(target, "versions", lambda: {"torch": "another"})
    name = shipped.structure(region)
    code = "import sys; from coda_inductor.core.region import parse; from coda_inductor.tuning import shipped; "
    code += "print(shipped.structure(parse(sys.argv[1])))"
    assert fresh(code, region.text, PYTHONHASHSEED="7").stdout.split() == [name]
    assert name == "20d82240ee8c22a1"
    twice, thrice = (replace(region, lets=(Let("t", "mul", ("acc", c)), *region.lets)) for c in (2.0, 3.0))
    assert shipped.structure(twice) == shipped.structure(thrice) != name
    assert len({name, *(shipped.structure(r) for r in (token_scale(128, 64), token_scale(64, 128)))}) == 3
