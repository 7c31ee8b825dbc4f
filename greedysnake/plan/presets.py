"""Models with published dimensions, to plan for without having them."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model's dimensions and where they are published.

    Attributes:
        settings: of its transformers config.
        tokens: sequence that it is trained with.
        source: publication.
    """

    settings: dict[str, Any]
    tokens: int
    source: str

    def config(self) -> PretrainedConfig:
        """Its transformers config."""
        settings = dict(self.settings)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)


def _gpt(layers: int, hidden: int, heads: int, source: str) -> ModelPreset:
    return ModelPreset(
        settings={
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": hidden,
            "n_head": heads,
            "vocab_size": 50257,
            "n_positions": 2048,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        tokens=2048,
        source=source,
    )


MODEL_PRESETS = {
    "gpt-30b": _gpt(48, 7168, 56, "dimensions of OPT-30B (arXiv 2205.01068, table 1), layers of GPT-2"),
    "gpt-65b": _gpt(80, 8192, 64, "dimensions of LLaMA-65B (arXiv 2302.13971, table 2), layers of GPT-2"),
    "gpt-175b": _gpt(96, 12288, 96, "GPT-3 (arXiv 2005.14165, table 2.1)"),
}
"""By the name that a person gives on the command line."""
