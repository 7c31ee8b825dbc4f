"""Whether transformers can build the config that ``model.config`` describes."""

import contextlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from greedysnake.config.problem import Problem, dotted, shown
from greedysnake.config.suggest import suggest

SECTION = "model.config"


def model_config_problems(config: Mapping[str, Any]) -> list[Problem]:
    """What transformers has against ``config``, which has a ``model_type``: unknown keys and wrong values.

    Takes seconds at its first call, which imports transformers.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = config["model_type"]
    model_types = [str(name) for name in CONFIG_MAPPING]  # all are names of packages, none is imported by this
    if model_type not in model_types:
        near = suggest(model_type, model_types) if isinstance(model_type, str) else None
        meant = f"; did you mean {near}?" if near else "; needs a model type such as llama"
        return [Problem(f"{SECTION}.model_type", f"transformers knows no {shown(model_type)}{meant}")]
    settings = {key: value for key, value in config.items() if key != "model_type"}

    def build(some: Mapping[str, Any]) -> Any:
        return AutoConfig.for_model(model_type, **some)

    # transformers checks types and more in many classes; whatever they raise is about the settings.
    try:
        built, refusal = build(settings), None
    except Exception as error:
        built, refusal = None, error
    problems = []
    if refusal is not None:
        problems += _wrong_values(build, settings) or [Problem(SECTION, _reason(refusal))]
    known = _known_names(CONFIG_MAPPING[model_type], build)
    for key, value in settings.items():
        if key not in known and _is_only_stored(key, value, built, build):
            near = suggest(key, sorted(name for name in known if not name.startswith("_")))
            meant = f"; did you mean {near}?" if near else ""
            problems.append(Problem(dotted(SECTION, key), f"unknown to model type {model_type}{meant}"))
    return problems


def _wrong_values(build: Any, settings: Mapping[str, Any]) -> list[Problem]:
    """A problem for each setting whose type is refused whatever the others are."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    problems = []
    for key, value in settings.items():
        try:
            build({key: value})
        except StrictDataclassFieldValidationError as error:
            problems.append(Problem(dotted(SECTION, key), f"found {shown(value)}; {_reason(error)}"))
        except Exception:  # it may fail alone and fit the others, as heads that divide the width
            continue
    return problems


def _known_names(config_class: type, build: Any) -> set[str]:
    """Names of settings, and of what config.json files hold beside them, such as ``_name_or_path``."""
    names = {field.name for field in fields(config_class)} if is_dataclass(config_class) else set()
    with contextlib.suppress(Exception):  # a few classes have no valid default; their fields are known then
        names |= set(vars(build({})))
    names |= set(getattr(config_class, "attribute_map", {}))
    return names


def _is_only_stored(key: str, value: object, built: Any, build: Any) -> bool:
    """Whether the config keeps ``key`` as an attribute that nothing reads.

    Older names, as ``rope_theta``, are taken too, but turned into today's settings, not stored.
    """
    if built is None:
        try:
            built = build({key: value})
        except Exception:  # its value was refused, so it is known
            return False
    return key in vars(built)


def _reason(error: Exception) -> str:
    """The last line of the message: before it, transformers says through which validators it came."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[-1] if lines else type(error).__name__).removeprefix("TypeError: ").removeprefix("ValueError: ")
    return text if len(text) <= 300 else text[:300] + "..."
