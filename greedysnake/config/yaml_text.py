"""YAML text to plain data and back: safe YAML, with duplicate keys found and ``2e-5`` read as a number."""

import re
from collections.abc import Iterator

import yaml

from greedysnake.config.problem import Problem, dotted, shown

_FLOAT_TAG = "tag:yaml.org,2002:float"
# YAML 1.1 wants a dot and a signed exponent in a number; people, Python and YAML 1.2 do not.
_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_STARTS = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """The safe loader, to which a number may have an exponent without a dot."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text that looks like a number gets quotes, nothing becomes an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML leaves these line breaks bare and folds them into a space when it reads them again.
        style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, _STARTS)
_Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, _STARTS)


def parse_yaml(text: str, name: str = "") -> tuple[object, list[Problem]]:
    """The data of one YAML document, and a problem for every key that a mapping holds twice.

    Args:
        text: The document.
        name: Dotted key of what the document is the value of; "" for a whole file.

    Raises:
        ValueError: ``text`` is not YAML, or a value in it cannot be read; with line and column where known.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, []
            # Before construction, which would keep the last of the same keys and say nothing.
            duplicates = list(_duplicates(node, name, set()))
            return loader.construct_document(node), duplicates
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line, column = _place(text, error.position)
        raise ValueError(f"line {line}, column {column}: a character that YAML does not allow") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = " ".join(str(error.problem or error.context).split())
        raise ValueError(f"{place}not valid YAML: {reason}") from error
    except RecursionError:
        raise ValueError("lists or mappings are nested too deeply") from None
    except Exception as error:  # the constructors of dates, numbers and the like raise as they please
        raise ValueError(f"a value cannot be read: {shown(error)}") from error


def dump_yaml(data: object) -> str:
    """Plain ``data`` as YAML text that `parse_yaml` reads back to equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _duplicates(node: yaml.Node, where: str, seen: set[int]) -> Iterator[Problem]:
    if id(node) in seen:  # an alias: reported where it was first written
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicates(item, f"{where}[{index}]", seen)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[tuple[str, str], yaml.Node] = {}
    for key, value in node.value:
        name = dotted(where, key.value if isinstance(key, yaml.ScalarNode) else "?")
        if isinstance(key, yaml.ScalarNode):
            before = first.setdefault((key.tag, key.value), key)
            if before is not key:
                lines = f"lines {before.start_mark.line + 1} and {key.start_mark.line + 1}"
                yield Problem(name, f"given twice, in {lines}; keep one of them")
        yield from _duplicates(value, name, seen)


def _place(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
