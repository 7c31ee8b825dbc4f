"""Small files of a store: read whole, replaced whole, sealed against damage."""

import contextlib
import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any, TypeVar

from crc32c import crc32c
from pydantic import BaseModel, ValidationError

from greedysnake.errors import StorageError
from greedysnake.storage.names import is_temporary, temporary_name
from greedysnake.storage.system import System, reason, uninterrupted

Model = TypeVar("Model", bound=BaseModel)

_SEAL = ',"crc32c":"%08x"}\n'
_SEAL_BYTES = len(_SEAL % 0)
_READ_BYTES = 2**20


def sealed(json_object: bytes) -> bytes:
    """The text of a JSON object with the checksum of itself as its last entry."""
    body = json_object.rstrip()[:-1]
    return body + (_SEAL % crc32c(body)).encode()


def is_sealed(content: bytes) -> bool:
    """Whether not a bit of :func:`sealed`'s result has changed."""
    body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    return seal == (_SEAL % crc32c(body)).encode()


def _parse_sealed(path: Path, content: bytes, form: str, version: int, what: str) -> dict[str, Any]:
    """The object in a sealed file of this format and version, without its seal.

    Raises:
        StorageError: it is damaged or of another kind.
    """
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != form:
        raise StorageError(f"{path} is not {what}")
    if is_sealed(content):
        raw.pop("crc32c")
    elif raw.get("version") == version or "crc32c" in raw:
        raise StorageError(f"{path} is damaged: its checksum does not fit its content")
    if raw.get("version") != version:
        raise StorageError(
            f"{path} has format version {raw.get('version')!r}; this version of greedysnake reads {version}"
        )
    return raw


def _damaged(path: Path, error: ValidationError) -> StorageError:
    """What is wrong with a file, from the first of its problems."""
    first = error.errors()[0]
    if not first["loc"]:
        return StorageError(f"{path} is damaged: {first['ctx']['error']}")
    return StorageError(f"{path} is damaged at {'.'.join(map(str, first['loc']))!r}: {first['msg']}")


def read_sealed(system: System, path: Path, model: type[Model], *, form: str, version: int, what: str) -> Model | None:
    """What a sealed file holds; None if there is no file.

    Args:
        system: the system calls.
        path: the file.
        model: of its content.
        form, version: its format.
        what: the file is, for messages.

    Raises:
        StorageError: it cannot be read, is damaged or of another kind.
    """
    try:
        content = read_file(system, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {reason(error)}") from error
    raw = _parse_sealed(path, content, form, version, what)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _damaged(path, error) from error


def read_file(system: System, path: Path) -> bytes:
    """All of a file. Raises OSError."""
    descriptor = uninterrupted(system.open, path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        content = bytearray()
        while part := uninterrupted(system.pread, descriptor, _READ_BYTES, len(content)):
            content += part
        return bytes(content)
    finally:
        close(system, descriptor)


def replace_file(system: System, path: Path, content: bytes) -> None:
    """Replace a file in one instant: a crash leaves the old one or the new one, whole.

    Raises:
        StorageError: the folder cannot be written. The old file or the new one is there.
    """
    temporary = path.with_name(temporary_name(path.name, uuid.uuid4().hex))
    try:
        descriptor = uninterrupted(system.open, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            try:
                write_all(system, descriptor, content)
                uninterrupted(system.fsync, descriptor)
            finally:
                close(system, descriptor)
            uninterrupted(system.replace, temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                uninterrupted(system.unlink, temporary)
            raise
        sync_folder(system, path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {reason(error)}") from error


def write_all(system: System, descriptor: int, content: bytes) -> None:
    """Write a file from its beginning. Raises OSError."""
    written = 0
    while written < len(content):
        written += uninterrupted(system.pwrite, descriptor, content[written:], written)


def sync_folder(system: System, folder: Path) -> None:
    """Make the names in a folder last. Raises OSError."""
    _flush(system, folder, os.O_DIRECTORY)


def flush_folder(system: System, folder: Path) -> None:
    """Make the names in a folder last.

    Raises:
        StorageError: they may not.
    """
    try:
        sync_folder(system, folder)
    except OSError as error:
        raise StorageError(f"cannot flush {folder}: {reason(error)}") from error


def close(system: System, descriptor: int) -> None:
    """Close a descriptor. A call that fails has closed it as well, and what it could tell of was flushed or is not
    promised, so it is never made twice."""
    with contextlib.suppress(OSError):
        system.close(descriptor)


def remove_file(system: System, path: Path) -> None:
    """Remove a file if it is there.

    Raises:
        StorageError: it cannot be removed.
    """
    try:
        uninterrupted(system.unlink, path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {reason(error)}") from error


def remove_temporary(system: System, folder: Path) -> None:
    """Remove what a crash left of files that were being replaced.

    Raises:
        StorageError: the folder cannot be read or written.
    """
    for name in names_in(system, folder):
        if is_temporary(name):
            remove_file(system, folder / name)


def names_in(system: System, folder: Path) -> list[str]:
    """Names in a folder, sorted.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        return sorted(uninterrupted(system.names, folder))
    except OSError as error:
        raise StorageError(f"cannot read the storage folder {folder}: {reason(error)}") from error


def sync_tree(system: System, folder: Path) -> None:
    """Make a folder and everything in it last, if there is one.

    Raises:
        StorageError: one of them cannot be flushed.
    """
    try:
        if not stat.S_ISDIR(uninterrupted(system.lstat, folder).st_mode):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot flush {folder}: {reason(error)}") from error
    for name in names_in(system, folder):
        path = folder / name
        try:
            mode = uninterrupted(system.lstat, path).st_mode
            if stat.S_ISREG(mode):
                _flush(system, path, os.O_NOFOLLOW)
        except OSError as error:
            raise StorageError(f"cannot flush {path}: {reason(error)}") from error
        if stat.S_ISDIR(mode):
            sync_tree(system, path)
    flush_folder(system, folder)
    flush_folder(system, folder.parent)  # its own name


def _flush(system: System, path: Path, flags: int) -> None:
    descriptor = uninterrupted(system.open, path, os.O_RDONLY | flags)
    try:
        uninterrupted(system.fsync, descriptor)
    finally:
        close(system, descriptor)
