"""Which parameters are not trained, by patterns over their names."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from greedysnake.errors import ConfigError


def frozen_by(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The parameters that some patterns freeze, by their first full names.

    Args:
        model: its parameters may be on the meta device.
        patterns: over full names, such as ``model.embed_tokens.weight`` or ``model.layers.[0-3].*``, as in ``fnmatch``
            (``*`` also matches dots). A shared parameter is frozen by any of its names.

    Raises:
        ConfigError: patterns that match nothing, with the names that are nearest.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        matched = {names[name] for name in names if fnmatchcase(name, pattern)}
        found |= matched
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            problems.append(
                f"freeze: {pattern!r} matches none of the model's {len(first)} parameters. Names near it: "
                f"{', '.join(near)}. To freeze all below a name, end the pattern with .*"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return frozenset(found)
