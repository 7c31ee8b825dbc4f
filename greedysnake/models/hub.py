"""Models by their name on the Hugging Face hub, where there is a hub."""

import re
from pathlib import Path

from greedysnake.errors import ModelError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)

WANTED_FILES = (
    "*.safetensors",
    "*.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
)
"""What is downloaded: no pickles, no weights of other frameworks."""

_CODE_FILES = ("*.py",)


def is_hub_name(path: str | Path) -> bool:
    """Whether a path that is no folder here may be the name of a model on the hub: ``organisation/model``."""
    return _NAME.fullmatch(str(path)) is not None and not Path(path).exists()


def local_folder(path: str | Path, *, with_code: bool = False) -> Path:
    """The folder of a model: ``path`` itself, or, where that is no folder but a name on the hub, a local copy.

    What the hub's local cache holds is used if the hub cannot be reached, or if ``HF_HUB_OFFLINE=1`` says not to try.

    Args:
        path: a folder, or ``organisation/model``.
        with_code: whether the model's own Python files are fetched too.

    Raises:
        ModelError: it is neither, or the model can be had neither from the hub nor from the cache.
    """
    if not is_hub_name(path):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = str(path)
    patterns = [*WANTED_FILES, *(_CODE_FILES if with_code else ())]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"model.path: the hub gives {name} only to those who have accepted its licence. Do so at "
            f"https://huggingface.co/{name}, and sign in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model.path: there is no folder {name} here, and no model of that name on the hub (or only for those who "
            f"are signed in: hf auth login)"
        ) from error
    except Exception as error:  # of the network, in many classes, or that it is not to be used
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model.path: there is no folder {name} here, and the model of that name cannot be had from the hub "
            f"({type(error).__name__}: {reason[:200]}), nor is it in the hub's local cache. Where there is a network, "
            f"run 'hf download {name}', then copy the folder here and give its path"
        ) from error
