"""Patterns from files: .smtx (Deep Learning Matrix Collection), .mtx (Matrix Market), .npz (SciPy).

Only positions are read: values are drawn by whoever uses them.
"""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse

from jaxsparse.topology import Topology

FOLDER_VARIABLE = "JAXSPARSE_DATA"


def _read_smtx(path: pathlib.Path) -> Any:
    """Three lines: "rows, columns, stored"; row offsets; column indices."""
    lines = path.read_text("ascii").splitlines()
    if len(lines) < 2:
        raise ValueError(f"needs three lines, got {len(lines)}")
    header = lines[0].replace(",", " ").split()
    if len(header) != 3:
        raise ValueError(f"line 1 must be 'rows, columns, stored', got {lines[0][:60]!r}")
    m, k, nnz = (int(number) for number in header)
    offsets, columns = (
        np.array((lines[i] if i < len(lines) else "").split(), np.int64) for i in (1, 2)
    )
    for name, array, expected in ("row offsets", offsets, m + 1), ("column indices", columns, nnz):
        if array.size != expected:
            raise ValueError(f"needs {expected} {name}, got {array.size}")
    if offsets[-1] != nnz:
        raise ValueError(f"the last row offset must be {nnz}, got {offsets[-1]}")
    return _matrix(offsets, columns, (m, k))


def _read_mtx(path: pathlib.Path) -> Any:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    # SciPy's parser runs past the end of a text that has a NUL in it, or no new line at its end.
    if b"\0" in text:
        raise ValueError("needs text, got a NUL byte")
    return scipy.io.mmread(io.BytesIO(text + b"\n"))


# How a .npz archive of bare arrays may call them: row offsets, column indices.
_ARRAYS = (("indptr", "indices"), ("row_offsets", "column_indices"))


def _read_npz(path: pathlib.Path) -> Any:
    with np.load(path, allow_pickle=False) as archive:
        names = set(archive.files)
        for offsets, columns in _ARRAYS:
            if {offsets, columns, "shape"} <= names and "format" not in names:
                m, k = (int(size) for size in archive["shape"])
                return _matrix(archive[offsets], archive[columns], (m, k))
    return scipy.sparse.load_npz(path)


def _matrix(offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Any:
    ones = np.ones(columns.shape, np.int8)
    return scipy.sparse.csr_array((ones, columns, offsets), shape=shape)


READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    ".smtx": _read_smtx,
    ".mtx": _read_mtx,
    ".mtx.gz": _read_mtx,
    ".npz": _read_npz,
}

# What the readers raise for files that are cut off, garbled, or something else altogether.
_MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    NotImplementedError,
    zlib.error,
    zipfile.BadZipFile,
)


def _suffix(path: pathlib.Path) -> str | None:
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), None)


def read_topology(path: pathlib.Path) -> Topology:
    """The stored positions of a file's matrix, columns sorted and duplicates merged.

    Raises:
        ValueError: if the file is not a readable matrix of its kind; names the file.
    """
    suffix = _suffix(path)
    if suffix is None:
        raise ValueError(f"{path}: must end in one of {', '.join(READERS)}")
    try:
        matrix = READERS[suffix](path)
        if getattr(matrix, "format", "csr") != "csr" or isinstance(matrix, np.ndarray):
            matrix = scipy.sparse.csr_array(matrix)
        matrix.check_format(full_check=True)
        matrix.sum_duplicates()
        return Topology(matrix.indptr, matrix.indices, matrix.shape)
    except _MALFORMED as error:
        raise ValueError(f"{path}: not a readable {suffix} matrix: {error}") from error


def data_folder() -> pathlib.Path:
    """The folder that the environment variable JAXSPARSE_DATA names.

    Raises:
        ValueError: if it is not set or names no folder.
    """
    name = os.environ.get(FOLDER_VARIABLE)
    if not name:
        raise ValueError(f"reads the folder in the environment variable {FOLDER_VARIABLE}: set it")
    if not pathlib.Path(name).is_dir():
        raise ValueError(f"needs a folder in {FOLDER_VARIABLE}, got {name!r}")
    return pathlib.Path(name)


def matrix_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Every matrix below a folder, sorted.

    Raises:
        ValueError: if there is none.
    """
    found = sorted(p for p in folder.rglob("*") if _suffix(p) is not None and p.is_file())
    if not found:
        raise ValueError(f"finds no file ending in {', '.join(READERS)} below {folder}")
    return found
