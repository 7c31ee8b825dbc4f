"""A YAML file and overrides to a checked `RunConfig`, and back to YAML."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from greedysnake.config.checks import cross_problems
from greedysnake.config.model_check import model_config_problems
from greedysnake.config.problem import Problem, dotted, shown
from greedysnake.config.reference import needed
from greedysnake.config.schema import RunConfig, is_optional, sections
from greedysnake.config.suggest import suggest_key
from greedysnake.config.yaml_text import dump_yaml, parse_yaml
from greedysnake.errors import ConfigError

Settings = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings in the YAML file ``path``, changed by ``overrides``.

    Relative paths among the settings are relative to the current working directory, not to the file. Whether
    they exist is not looked at here.

    Args:
        path: A YAML file that holds one mapping.
        overrides: ``key=value`` each, such as ``optimizer.lr=1e-4``. The value is read as YAML; a later one
            wins.

    Raises:
        ConfigError: the file cannot be read or is not YAML, or settings are wrong: all of them, a line each.
    """
    raw, problems = _read(Path(path))
    problems += _apply(overrides, raw)
    problems += _tidy(raw)
    config: RunConfig | None = None
    wrong: dict[str, Problem] = {}
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        wrong = _wrong_values(error, raw)
    problems += wrong.values()
    values = _valid_values(raw, wrong.keys())
    problems += cross_problems(values)
    model = values.get("model.config")
    if model is not None and "model_type" in model:
        problems += model_config_problems(model)
    if problems or config is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{path}: {count}", *map(str, problems)]))
    return config


def dump_config(config: RunConfig) -> str:
    """YAML with every setting of ``config``, which `load_config` reads back to an equal one."""
    return dump_yaml(_plain(config.model_dump()))


def _read(path: Path) -> tuple[Settings, list[Problem]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; needs a YAML file of settings") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(str(path))}: cannot be read: {error}") from error
    try:
        raw, duplicates = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else shown(raw)
        raise ConfigError(f"{path}: found {found}; needs a mapping of settings, such as 'run: runs/first'")
    return raw, duplicates


def _apply(overrides: Sequence[str], raw: Settings) -> list[Problem]:
    """Sets the overrides in ``raw``; returns what is wrong with them."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(Problem(f"override {shown(override)}", "needs the form key=value, such as seed=1"))
            continue
        try:
            value, duplicates = parse_yaml(text, key.strip())
        except ValueError as error:
            problems.append(Problem(f"override {shown(override)}", str(error)))
            continue
        problems += duplicates
        target = raw
        for depth, part in enumerate(parts[:-1], 1):
            inner = target.get(part)
            if inner is None:
                # A new mapping, also where an alias shares the old one: only this key is to change.
                inner = {}
            if not isinstance(inner, dict):
                text = f"cannot be set: {'.'.join(parts[:depth])} is {shown(inner)}, not a mapping"
                problems.append(Problem(key.strip(), text))
                break
            target[part] = inner = dict(inner)
            target = inner
        else:
            target[parts[-1]] = value
    return problems


def _tidy(raw: Settings) -> list[Problem]:
    """Takes unknown keys out of ``raw`` and adds empty sections; returns what is wrong with the shape."""
    schema = {name: list(model.model_fields) for name, model in sections().items()}
    problems = []
    for name, known in schema.items():
        if is_optional(name) and raw.get(name) is None:
            raw[name] = None
            continue
        if name and raw.get(name) is None:
            raw[name] = {}  # a section that is absent or has nothing under it: its defaults, or its missing keys
        section = raw[name] if name else raw
        if not isinstance(section, dict):
            needs = f"needs keys of its own, such as {known[0]}"
            problems.append(Problem(name, f"found {shown(section)}; {needs}"))
            continue
        unknown = [key for key in section if key not in known]
        problems += [_unknown(name, key, schema) for key in unknown]
        kept = {key: value for key, value in section.items() if key in known}
        if name:
            raw[name] = kept
        else:
            for key in unknown:
                del raw[key]
    return problems


def _unknown(section: str, key: object, schema: Mapping[str, list[str]]) -> Problem:
    meant = suggest_key(section, key, schema) if isinstance(key, str) else None
    name = dotted(section, key)
    if meant == name:  # written with a dot, where YAML wants one mapping in another
        outer, _, inner = meant.rpartition(".")
        return Problem(name, f"unknown key; write {inner}: on a line of its own, indented under {outer}:")
    if meant:
        return Problem(name, f"unknown key; did you mean {meant}?")
    return Problem(name, f"unknown key; known here: {', '.join(schema[section])}")


def _wrong_values(error: ValidationError, raw: Settings) -> dict[str, Problem]:
    """A problem for each setting that pydantic refuses, by dotted key."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False, include_input=False):
        where = detail["loc"]
        if not where or (where[0] in sections() and len(where) == 1):
            continue  # cross checks, made again over what is valid; sections that are no mapping, reported
        section, key = (str(where[0]), str(where[1])) if where[0] in sections() else ("", str(where[0]))
        name = f"{section}.{key}" if section else key
        model = sections()[section]
        if detail["type"] == "missing" and len(where) == (2 if section else 1):
            example = (model.model_fields[key].examples or ["..."])[0]
            under = f" under {section}:" if section else ""
            problems[name] = Problem(name, f"missing; write {key}: {example}{under}")
            continue
        found = (raw[section] if section else raw)[key]
        reason = detail.get("ctx", {}).get("error")
        # Validators of this package say what they need; for pydantic's own, the schema does.
        text = str(reason) if isinstance(reason, ValueError) else f"needs {needed(model, key)}"
        problems.setdefault(name, Problem(name, f"found {shown(found)}; {text}"))
    return problems


def _valid_values(raw: Settings, wrong: Collection[str]) -> Settings:
    """The settings of ``raw`` that are right by themselves, defaults included, by dotted key."""
    values: Settings = {}
    for name, model in sections().items():
        section = raw[name] if name else {}
        if not isinstance(section, dict):
            continue
        for key, field in model.model_fields.items():
            full = f"{name}.{key}"
            if full in wrong or not name:
                continue
            if key in section:
                kind: Any = Annotated[field.annotation, *field.metadata, field.description]
                values[full] = TypeAdapter(kind).validate_python(section[key])
            else:
                values[full] = field.get_default(call_default_factory=True)
    return values


def _plain(value: object) -> object:
    """``value`` with paths as text and tuples as lists, as YAML has neither."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
