"""The models that are compared, and the folder of first weights that all systems start from."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from greedysnake.config.yaml_text import parse_yaml
from greedysnake.engine.opening import config_of
from greedysnake.errors import ConfigError

_DONE = "first-weights.json"


def _llama(*, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocabulary=512, tied=False),
    "0.37b": _llama(layers=24, hidden=1024, ffn=2816, heads=16, kv_heads=16, vocabulary=32000, tied=False),
    "1.1b": _llama(layers=22, hidden=2048, ffn=5632, heads=32, kv_heads=4, vocabulary=32000, tied=False),
    "3b": _llama(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8, vocabulary=128256, tied=True),
}
"""Transformers configs by the name that a person gives."""


def bench_config(model: str, tokens: int) -> PretrainedConfig:
    """A preset's config, or that of a model folder, of a transformers config or of a run's settings (YAML or JSON).

    Args:
        model: name, folder or file.
        tokens: of a sequence; the preset's positions.

    Raises:
        ConfigError, ModelError: there is no such model, or it cannot be used.
    """
    if model in PRESETS:
        values = {**PRESETS[model], "max_position_embeddings": tokens}
        return AutoConfig.for_model(values.pop("model_type"), **values)
    path = Path(model)
    if path.is_dir():
        return config_of(path)
    try:
        data, problems = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: neither one of {', '.join(PRESETS)} nor a file: {error}") from error
    values = dict(data) if isinstance(data, dict) else {}
    given = values.get("model", values)
    values = given.get("config", given) if isinstance(given, dict) else {}
    if isinstance(given, dict) and given.get("path"):
        return config_of(Path(str(given["path"])).expanduser())
    if problems or "model_type" not in values:
        raise ConfigError(
            f"--model {model}: found no model_type in it; needs a transformers config, or a run's settings with "
            f"model.config"
        )
    settings = {str(name): value for name, value in values.items()}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def write_first_weights(config: PretrainedConfig, folder: Path, seed: int) -> None:
    """A model folder with random bfloat16 weights, unless it is there already.

    Args:
        config: of the model.
        folder: to make.
        seed: of the weights.

    Raises:
        ConfigError: the folder holds the weights of something else.
    """
    wanted = {"config": json.loads(config.to_json_string()), "seed": seed}
    note = folder / _DONE
    if note.exists():
        if json.loads(note.read_text()) != wanted:
            raise ConfigError(
                f"{folder} holds first weights of another model or seed; delete it, or give another --storage"
            )
        return
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    note.write_text(json.dumps(wanted))
