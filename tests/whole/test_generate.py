"""transformers' `generate`: the tokens and logits of eager, whatever part of the model is compiled, and however.

The first graph reads the prompt (its head sees the last token alone), the second decodes into a static cache. A layer
that is compiled alone has two graphs of its own; a cache that grows costs one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluate import error, strict_reference
from torch import Tensor

from coda_inductor.inductor.joint_pass import REPORTS

CLOSE = 1e-5  # logits in float32, of the largest
NEW = 6
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "attn_implementation": "sdpa",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def llama() -> Any:
    """The same weights each time. In float32 a norm's cast to float32 is none, so that the laws see through it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def prompt(length: int) -> Tensor:
    torch.manual_seed(length)
    return torch.randint(1, CONFIG["vocab_size"], (2, length))


def generate(model: Any, length: int, **how: Any) -> tuple[Tensor, Tensor]:
    """(token ids, the logits that each was taken from) for one prompt."""
    asked = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"} | how
    out = model.generate(prompt(length), output_logits=True, return_dict_in_generate=True, **asked)
    return out.sequences, torch.stack(out.logits)


def forward(model: Any) -> dict[str, Any]:
    model.forward = torch.compile(model.forward, backend="coda", fullgraph=True)
    return {}


def whole(model: Any) -> dict[str, Any]:
    model.compile(backend="coda")
    return {}


def each_layer(model: Any) -> dict[str, Any]:
    for layer in model.model.layers:
        layer.compile(backend="coda")
    return {}


def layer_within(model: Any) -> dict[str, Any]:
    """Dynamo makes one graph of both."""
    model.model.layers[1].compile(backend="coda")
    return forward(model)


def by_transformers(model: Any) -> dict[str, Any]:
    """It compiles what decodes; on a CPU only when told to."""
    from transformers import CompileConfig

    config = CompileConfig(backend="coda", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def growing(model: Any) -> dict[str, Any]:
    return forward(model) | {"cache_implementation": "dynamic"}


# A layer is o, gate with up, down; the second one's q, k and v follow the first one's norm; so does the head, which in
# the first graph does not see all tokens.
WAYS: list[tuple[Callable[[Any], dict[str, Any]], list[int]]] = [
    (forward, [11, 12]), (whole, [11, 12]), (each_layer, [5, 5, 5, 5]), (layer_within, [11, 12]),
    (by_transformers, [12]),
    (growing, [11, 12, 12]),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("way", "regions"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_generate(way: Callable[[Any], dict[str, Any]], regions: list[int]) -> None:
    check(way, regions, run=False)


def test_generate_with_inductors_code() -> None:
    """As above, all the way through Inductor, which writes the cache in place."""
    check(forward, [11, 12], run=True)


def check(way: Callable[[Any], dict[str, Any]], regions: list[int], run: bool) -> None:
    """Three prompts in turn: one of the same length compiles nothing again, one of another nothing that decodes."""
    model = llama()
    wanted = [generate(model, length) for length in (7, 7, 5)]
    model, found = llama(), list[tuple[Tensor, Tensor]]()  # without eager's cache
    with strict_reference(run=run):
        how = way(model)
        REPORTS.clear()
        for length in (7, 7):
            found.append(generate(model, length, **how))
            assert [len(report.sites) for report in REPORTS] == regions
        assert all("bilinearity" in {law for site in report.sites for law in site.laws} for report in REPORTS)
        found.append(generate(model, 5, **how))
        again = list(REPORTS)[len(regions) :]
        assert way is growing or all(site.m != "2" for report in again for site in report.sites)
    for (tokens, logits), (same, right) in zip(found, wanted, strict=True):
        assert torch.equal(tokens, same) and error(logits, right) < CLOSE
