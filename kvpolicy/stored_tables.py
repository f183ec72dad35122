"""Parquet files of others, opened only where their rows fit into memory.

Called by whatever reads a table: traces, tables of operator times, distributions of lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvpolicy.errors import InputError

MAX_TABLE_BYTES = 4 << 30
"""Maximum size of one file's rows in memory."""
MAX_SURE_BYTES = 64 << 20
"""Below this bound of a column's texts nothing has to be read to know their size."""


class UnreadableTable(InputError):
    """A file that is no Parquet table, or whose rows would take too much memory; the message names the file."""


def opened(path: Path, columns: Sequence[str] | None = None, max_bytes: int | None = None) -> pq.ParquetFile:
    """A file, once its footer says that its rows fit into ``max_bytes``, by default :data:`MAX_TABLE_BYTES`.

    ``columns``: top-level ones that are to be read; None for all. Raises FileNotFoundError where it is gone,
    UnreadableTable for what is no Parquet file and for one whose rows would take more, as a small file may whose values
    repeat.
    """
    limit = MAX_TABLE_BYTES if max_bytes is None else max_bytes
    try:
        file = pq.ParquetFile(path, memory_map=False)
        bytes_of, texts = _sizes(file.metadata, columns)
        rows = file.metadata.num_rows
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UnreadableTable(f"{path}: damaged or not a Parquet file: {error}") from error
    if bytes_of <= limit and texts:
        try:
            bytes_of += sum(_text_bytes(path, text, limit - bytes_of) for text in texts)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UnreadableTable(f"{path}: damaged or not a Parquet file: {error}") from error
    if bytes_of > limit:
        raise UnreadableTable(
            f"{path}: its {rows:,} rows would take {bytes_of / 2**30:.1f} GiB of memory or more, at most "
            f"{limit / 2**30:.1f} are read: split the file"
        )
    return file


@dataclass(slots=True)
class _Texts:
    """A column of texts of which the footer does not tell the size: a short one may stand for many long ones."""

    path: str
    bound: int = 0
    largest: int = 0
    """Bytes of its largest row group as it is stored, so of a single text at most."""
    in_dictionary: bool = True


def _sizes(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> tuple[int, list[_Texts]]:
    """Bytes of the values in memory as far as the footer tells, and the columns of which it does not."""
    total = 0
    found: dict[str, _Texts] = {}
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            path = column.path_in_schema
            # A dot is before each level of a nested column, and may be in a name.
            if columns is not None and not any(path == name or path.startswith(f"{name}.") for name in columns):
                continue
            total += max(0, column.num_values) * 8 + max(0, column.total_uncompressed_size)
            if column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
                texts = found.setdefault(path, _Texts(path))
                texts.bound += max(0, column.num_values) * max(0, column.total_uncompressed_size)
                texts.largest = max(texts.largest, column.total_uncompressed_size)
                texts.in_dictionary &= column.has_dictionary_page
    return total, [texts for texts in found.values() if texts.bound > MAX_SURE_BYTES]


def _text_bytes(path: Path, texts: _Texts, limit: int) -> int:
    """Bytes of a column's texts, each as often as it is there; read as distinct texts and their numbers where they are
    stored so, or else a few at a time."""
    total = 0
    nested = "." in texts.path
    if texts.in_dictionary and not nested:
        file, rows = pq.ParquetFile(path, read_dictionary=[texts.path]), 1 << 16
    else:
        file, rows = pq.ParquetFile(path), max(16, min(1 << 16, MAX_SURE_BYTES // max(1, texts.largest)))
    for batch in file.iter_batches(batch_size=rows, columns=[texts.path]):
        total += sum(_lengths(array) for array in batch.columns)
        if total > limit:
            break
    return total


def _lengths(array: pa.Array) -> int:
    if pa.types.is_dictionary(array.type):
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return int(pc.sum(lengths.take(array.indices)).as_py() or 0)
    if pa.types.is_list(array.type):
        return _lengths(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(_lengths(one) for one in array.flatten())
    return int(array.nbytes)
