"""The demo runs here as in ./dev demo, and what it says is true."""

from __future__ import annotations

import re

import pytest
import torch

from coda_inductor import demo


def test_demo_says_what_is_derived_saved_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    said = capsys.readouterr().out
    assert "12 Regions" in said and "bilinearity 10 x" in said
    assert "layers.0.feed_forward.gate, layers.0.feed_forward.up   by bilinearity" in said
    before, after = map(float, re.search(r"([\d.]+) MB -> ([\d.]+) MB; \d+%", said).groups())  # type: ignore[union-attr]
    assert 0 < after < before / 2
    assert "no product's result is read here" in said
    exact = dict(re.findall(r"(float64|bfloat16), .* coda (\S+)", said))
    assert float(exact["float64"]) < 1e-13
    _, ours, eager = re.search(r"(bfloat16), the program on torch +coda (\S+) +eager (\S+)", said).groups()  # type: ignore[union-attr]
    assert float(ours) <= 1.1 * float(eager)


def test_the_demos_model_is_a_causal_language_model() -> None:
    torch.manual_seed(0)
    model, ids = demo.Llama(), torch.randint(demo.VOCABULARY, (1, demo.LENGTH))
    other = ids.clone()
    other[0, -1] += 1
    with torch.no_grad():
        a, b = model(ids), model(other % demo.VOCABULARY)
    torch.testing.assert_close(a[0, :-1], b[0, :-1])
    assert not torch.allclose(a[0, -1], b[0, -1])
