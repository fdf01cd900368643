"""How `coverage.py` makes a model: a case is its class, its configuration and its inputs; coverage_zoo.py lists them.

`build` makes the model in memory that is reserved and never touched. In training a model with a head returns its loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coda_inductor.explain.capture import OnCpu, Untouched

Sizes = Mapping[str, Any]


def ids(*shape: int) -> Tensor:
    """The shape of an input of whole numbers."""
    return torch.empty(shape, dtype=torch.long, device="meta")


def real(*shape: int) -> Tensor:
    """The shape of an input in bfloat16."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def pixels(batch: int, side: int) -> dict[str, Tensor]:
    """Square pictures, as vision models of transformers name them."""
    return {"pixel_values": real(batch, 3, side, side)}


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Token ids [batch, length]."""
    return {"input_ids": ids(batch, length)}


@dataclass(frozen=True)
class Case:
    """A model: `dense` if it is a transformer that the means are taken over, `layers` as many as it has in all. Without
    `dropout` every rate of the configuration is 0; with `autocast` the weights are float32; `change` is what is done to
    the model once it is made. `given` are arguments that are no tensors."""

    family: str
    model: str
    config: str
    sizes: Sizes
    inputs: Mapping[str, Tensor]
    dense: bool = True
    layers: int = 2
    package: str = "transformers"
    loss: bool = False
    dropout: bool = False
    autocast: bool = False
    change: Callable[[Any], Any] = lambda model: model
    given: Sizes = field(default_factory=dict)


class Called(nn.Module):
    """The model, called with tensors by place: its loss in training if it has one, else the first of its outputs."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__()
        self.model, self.loss, self.autocast = model, case.loss, case.autocast
        self.names, self.given = tuple(case.inputs), dict(case.given)

    def forward(self, *tensors: Tensor) -> Any:
        if not self.autocast:
            return self.result(dict(zip(self.names, tensors, strict=True)))
        with torch.autocast("cuda", torch.bfloat16):
            return self.result(dict(zip(self.names, tensors, strict=True)))

    def result(self, inputs: dict[str, Any]) -> Any:
        """A decoder behind an encoder makes its inputs of the labels; all others are to find the tokens they read."""
        if self.loss and self.training:
            labels = inputs.pop("decoder_input_ids") if "decoder_input_ids" in inputs else inputs["input_ids"]
            return self.model(**inputs, labels=labels).loss
        out = self.model(**inputs, **self.given)
        return out if isinstance(out, Tensor) else out[0]


def made(case: Case) -> Any:
    """The model itself. Raises ModuleNotFoundError where a package is missing that it is of."""
    package = importlib.import_module(case.package)
    if case.package == "timm":
        model = package.create_model(case.model, **case.sizes)
    elif case.config:
        config = getattr(package, case.config)(**case.sizes)
        model = getattr(package, case.model)(config if case.dropout else without_dropout(config))
    else:
        model = getattr(package, case.model)(**case.sizes)
    model = case.change(model)
    return model if case.autocast else model.to(torch.bfloat16)


def build(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """(model, args). Raises ModuleNotFoundError as `made` does."""
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        args = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in case.inputs.values())
        return Called(made(case), case), args


def without_dropout(config: Any) -> Any:
    """The configuration with every rate of dropout, of layers too, at 0."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def lora(model: Any) -> Any:
    """Adapters of rank 16 in bfloat16 at all products of the layers."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def sizes(width: int, inner: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The fields that most configurations of transformers share; `inner` is the feed-forward's width."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": vocab, "num_hidden_layers": 2, "max_position_embeddings": 8192, "pad_token_id": 0,
        "use_cache": False,
    } | more  # fmt: skip


def decoder(name: str, fields: Sizes, batch: int = 2, length: int = 4096, **more: Any) -> Case:
    """A causal language model of transformers whose classes begin with `name`, with its loss."""
    options: dict[str, Any] = {"family": "decoder", "config": f"{name}Config", "loss": True} | more
    return Case(model=f"{name}ForCausalLM", sizes=fields, inputs=tokens(batch, length), **options)


def experts(name: str, fields: Sizes) -> Case:
    """A causal language model whose feed-forwards are mixtures of experts."""
    return decoder(name, fields, family="mixture of experts", dense=False)


def encoder(name: str, fields: Sizes, batch: int = 16, length: int = 512, **more: Any) -> Case:
    """A masked language model of transformers, with its loss."""
    inputs = tokens(batch, length)
    return Case("encoder", f"{name}ForMaskedLM", f"{name}Config", fields, inputs, loss=True, **more)


def t5(**more: Any) -> Case:
    """T5-large; `more` are fields of its configuration, and `dropout`."""
    fields = {
        "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 2, "num_heads": 16, "vocab_size": 32128,
        "use_cache": False, "decoder_start_token_id": 0,
    }  # fmt: skip
    dropout = more.pop("dropout", False)
    both = tokens(8, 512) | {"decoder_input_ids": ids(8, 512)}
    return Case(
        "encoder and decoder", "T5ForConditionalGeneration", "T5Config", fields | more, both, dense=False, layers=4,
        loss=True, dropout=dropout,
    )  # fmt: skip


def vision(name: str, fields: Sizes, batch: int, side: int, **more: Any) -> Case:
    """A vision model of transformers without a head."""
    return Case("vision", f"{name}Model", f"{name}Config", fields, pixels(batch, side), **more)


def of_timm(name: str, fields: Sizes, batch: int, side: int, **more: Any) -> Case:
    """A classifier of timm, without a loss."""
    return Case("vision", name, "", fields, {"x": real(batch, 3, side, side)}, package="timm", **more)


def diffusion(name: str, fields: Sizes, inputs: Mapping[str, Tensor], **more: Any) -> Case:
    """A denoiser of diffusers."""
    return Case("diffusion", name, "", fields, inputs, package="diffusers", **more)
