"""What a hint says, and how it is found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from codegen_cases import token_scale
from processes import fresh

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Let
from coda_inductor.tuning import shipped


def test_what_a_hint_says_holds_within_the_noise() -> None:
    tile = shipped.Tile(Config(128, 128, 2, 1, True), 1.2)
    assert tile.holds(1.2) and tile.holds(1.31) and tile.holds(1.09)
    assert not tile.holds(1.33) and not tile.holds(1.07) and not tile.holds(math.nan)
    assert not tile._replace(share=None).holds(1.2)


def test_what_cannot_be_read_is_no_hint(tmp_path: Path) -> None:
    """Files and rows."""
    region, size = token_scale(64, 64), 512
    config = legality.candidates(region, size)[0]
    structure, path = shipped.structure(region), tmp_path / shipped.file_of("none")
    right: dict[str, dict[str, Any]] = {
        "regions": {structure: {"buckets": {str(size): {"tile": str(config), "share": 1.1}}}},
        "groups": {shipped.together([structure]): {"buckets": {str(size): {"wins": True, "ratio": 1.2}}}},
        "laws": {shipped.together([structure], [structure]): {"buckets": {str(size): {"ratio": 0.9}}}},
    }

    def told(text: str) -> list[object]:
        path.write_text(text, encoding="latin-1")
        shipped._rows.cache_clear()
        found = shipped.hints("none", tmp_path)
        return [found.tile(region, size), found.group([region], size), found.law([region], [region], size)]

    head = {"schema": shipped.SCHEMA, "card": "none"}
    assert told(json.dumps(head | right)) == [shipped.Tile(config, 1.1), shipped.Expected(True, 1.2), 0.9]
    fared = {str(size): {"wins": 1, "ratio": "2", "tile": 3}}
    texts = ["", "{", "[]", "{}", "\xff", json.dumps(head | right | {"card": "another"})]
    texts += [json.dumps(head | right | {"schema": shipped.SCHEMA - 1})]
    wrong: tuple[Any, ...] = (3, [], {"buckets": []}, {"buckets": fared})
    for row in wrong:
        texts.append(json.dumps(head | {kind: dict.fromkeys(of, row) for kind, of in right.items()}))
    texts += [json.dumps(head | dict.fromkeys(right, rows)) for rows in wrong[:2]]
    for text in texts:
        assert told(text) == [None, None, None], text


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
