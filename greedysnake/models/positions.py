"""How long a sequence a model takes."""

from transformers import PretrainedConfig


def max_positions(config: PretrainedConfig) -> int | None:
    """Most tokens of a sequence; None: no limit, which some configs say with a number below 1 (XLNet: -1)."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None or positions < 1 else int(positions)
