"""The key that somebody probably meant."""

import difflib
from collections.abc import Iterable, Mapping

# Names that other training tools use for settings of this one.
NAMES_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "adam_epsilon": "optimizer.eps",
    "wd": "optimizer.weight_decay",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "lr_scheduler": "optimizer.lr_schedule",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "gradient_accumulation": "training.micro_batches",
    "gradient_accumulation_steps": "training.micro_batches",
    "per_device_train_batch_size": "training.micro_batch_size",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "eval_steps": "training.eval_every",
    "early_stopping_patience": "training.early_stop",
    "load_best_model_at_end": "training.keep_best",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "dataset": "data.train",
    "precision": "model.dtype",
    "torch_dtype": "model.dtype",
    "model_name_or_path": "model.path",
    "output_dir": "run",
    "alpha": "engine.delayed_share",
    "nvme_path": "engine.storage",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
}


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The entry of ``known`` that is spelled most like ``word``, or None if none is close.

    Upper and lower case, dashes and underscores do not count.
    """
    if len(word) > 100:  # no name is that long, and the comparison would take long
        return None
    spelled = {_letters(name): name for name in known}
    close = difflib.get_close_matches(_letters(word), spelled, n=1, cutoff=0.6)
    return spelled[close[0]] if close else None


def suggest_key(section: str, word: str, schema: Mapping[str, Iterable[str]]) -> str | None:
    """The dotted key that ``word``, unknown in ``section``, probably means, or None.

    Args:
        section: Where the unknown key was found; "" is the top level.
        word: The unknown key.
        schema: The known keys of every section.
    """
    here = {_letters(name): _join(section, name) for name in schema[section]}
    elsewhere: dict[str, str] = {}
    for other, names in schema.items():
        for key in (_join(other, name) for name in names):
            elsewhere.setdefault(_letters(key.rpartition(".")[2]), key)
            elsewhere[_letters(key)] = key  # in case somebody wrote the dotted key into the file
    letters = _letters(word)
    exact = here.get(letters) or elsewhere.get(letters) or NAMES_ELSEWHERE.get(word.lower().replace("-", "_"))
    if exact:
        return exact
    near = suggest(word, schema[section])
    if near:
        return _join(section, near)
    far = suggest(word, elsewhere)
    return elsewhere[far] if far else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
