"""Names of everything that a store keeps in its folders."""

import re

SLOT_NAMES = ("slot0.bin", "slot1.bin")
FIXED_NAME = "fixed.bin"
SCRATCH_NAME = "scratch.bin"
RATE_NAME = "rate.bin"
LOCK_NAME = "lock"
MANIFEST_NAME = "manifest.json"
IDENTITY_NAME = "folder.json"

OWNER_FOLDER = "model"
"""A folder beside the first folder's files for what the store's owner adds: it becomes durable with the first commit,
and goes when the store is removed."""

OWNER_INNER_FOLDERS = ("tokenizer", "tokenizer/additional_chat_templates")
"""Folders in that one that the owner may make too; whatever else is in it is somebody else's."""

_TEMPORARY = re.compile(rf"\.({re.escape(MANIFEST_NAME)}|{re.escape(IDENTITY_NAME)})\.[0-9a-f]+")


def temporary_name(name: str, unique: str) -> str:
    """Name of a file that becomes ``name`` once it is complete."""
    return f".{name}.{unique}"


def is_temporary(name: str) -> bool:
    """Whether a file is one that never became complete."""
    return _TEMPORARY.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Whether a store may have made a file or folder of this name in one of its folders."""
    own = {*SLOT_NAMES, FIXED_NAME, SCRATCH_NAME, RATE_NAME, LOCK_NAME, MANIFEST_NAME, IDENTITY_NAME, OWNER_FOLDER}
    return name in own or is_temporary(name)
