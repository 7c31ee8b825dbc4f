"""Models with published dimensions, to plan for without having them.

What a plan needs of them is kept in ``presets.json``, so that no model is built, and neither torch nor transformers is
loaded. ``python -m greedysnake.plan.presets greedysnake/plan/presets.json`` makes that file anew.
"""

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from greedysnake.plan.activations import ActivationSizes
from greedysnake.plan.workload import PartSizes, Workload
from greedysnake.schedule import ChunkShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model whose layers are all alike, as its :class:`~greedysnake.plan.workload.Workload` has it.

    Attributes:
        embedding, layer, head: sizes of each.
        tied, embedding_backward_needs_weights, largest_chunk, activations: as in a workload.
        saved_token_bytes: that a layer saves for the backward of each token, in sequences of the preset's length.
    """

    embedding: PartSizes
    layer: PartSizes
    head: PartSizes
    tied: bool
    embedding_backward_needs_weights: bool
    largest_chunk: ChunkShape
    activations: ActivationSizes
    saved_token_bytes: int


_FILE = TypeAdapter(dict[str, Described])


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model's dimensions and where they are published.

    Attributes:
        name: what a person calls it.
        settings: of its transformers config.
        layers: decoder layers.
        tokens: sequence that it is trained with.
        source: publication.
    """

    name: str
    settings: dict[str, Any]
    layers: int
    tokens: int
    source: str

    def config(self) -> "PretrainedConfig":
        """Its transformers config."""
        from transformers import AutoConfig

        settings = dict(self.settings)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)

    def workload(self) -> Workload:
        """Its sizes in bfloat16."""
        described = _described()[self.name]
        return Workload(
            name=self.name,
            dtype=DTYPE,
            parts=(described.embedding, *[described.layer] * self.layers, described.head),
            tied=described.tied,
            embedding_backward_needs_weights=described.embedding_backward_needs_weights,
            largest_chunk=described.largest_chunk,
            activations=described.activations,
            saved_bytes=lambda tokens: tokens * described.saved_token_bytes,
        )


@cache
def _described() -> dict[str, Described]:
    return _FILE.validate_json((files("greedysnake.plan") / "presets.json").read_bytes())


def _gpt(name: str, layers: int, hidden: int, heads: int, source: str) -> ModelPreset:
    return ModelPreset(
        name=name,
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
        layers=layers,
        tokens=2048,
        source=source,
    )


MODEL_PRESETS = {
    preset.name: preset
    for preset in (
        _gpt("gpt-30b", 48, 7168, 56, "dimensions of OPT-30B (arXiv 2205.01068, table 1), layers of GPT-2"),
        _gpt("gpt-65b", 80, 8192, 64, "dimensions of LLaMA-65B (arXiv 2302.13971, table 2), layers of GPT-2"),
        _gpt("gpt-175b", 96, 12288, 96, "GPT-3 (arXiv 2005.14165, table 2.1)"),
    )
}
"""By the name that a person gives on the command line."""


def describe(preset: ModelPreset) -> Described:
    """What is kept of a preset, from the real model's modules."""
    from greedysnake.plan.describe import describe_model

    found = describe_model(preset.config(), dtype=DTYPE)
    return Described(
        embedding=found.parts[0],
        layer=found.parts[1],
        head=found.parts[-1],
        tied=found.tied,
        embedding_backward_needs_weights=found.embedding_backward_needs_weights,
        largest_chunk=found.largest_chunk,
        activations=found.activations,
        saved_token_bytes=found.saved_bytes(preset.tokens) // preset.tokens,
    )


if __name__ == "__main__":
    kept = {name: describe(preset) for name, preset in MODEL_PRESETS.items()}
    Path(sys.argv[1]).write_bytes(_FILE.dump_json(kept, indent=2) + b"\n")
