"""Parquet files and folders that `datasets` saved: their rows, a few at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greedysnake.errors import DataError, first_line

_ROWS_AT_ONCE = 256

Rows = Iterator[dict[str, Any]]


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``folder`` is what `datasets.Dataset.save_to_disk` leaves."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def parquet_rows(path: Path, columns: Sequence[str] = ()) -> Rows:
    """Rows of a Parquet file; of the ``columns`` those that there are, all if there are none of them.

    Raises:
        DataError: the file cannot be read.
    """
    with _reading_parquet(path) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=present or None):
            yield from batch.to_pylist()


def parquet_row_count(path: Path) -> int:
    """How many rows a Parquet file says it has.

    Raises:
        DataError: it is no Parquet file.
    """
    with _reading_parquet(path) as file:
        return int(file.metadata.num_rows)


def dataset_rows(path: Path, columns: Sequence[str] = ()) -> Rows:
    """Rows of a saved dataset, columns as for `parquet_rows`.

    Raises:
        DataError: it cannot be loaded.
    """
    dataset = _open_dataset(path)
    present = [name for name in columns if name in dataset.column_names]
    dataset = dataset.select_columns(present or dataset.column_names).with_format("arrow")
    for table in dataset.iter(batch_size=_ROWS_AT_ONCE):
        yield from table.to_pylist()


def dataset_row_count(path: Path) -> int:
    """How many rows a saved dataset has.

    Raises:
        DataError: it cannot be loaded.
    """
    return len(_open_dataset(path))


def _open_dataset(path: Path) -> Any:
    import datasets

    try:
        return datasets.Dataset.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # whatever a damaged or foreign file makes of its reader
        raise DataError(
            f"{path}: looks like a folder of datasets' save_to_disk, but cannot be loaded "
            f"({type(error).__name__}: {first_line(error)}); save it again"
        ) from error


@contextmanager
def _reading_parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({first_line(error)}); write the file again, or leave it out"
        ) from error
