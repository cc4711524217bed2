"""Reads the data of a user: an .npz, .csv or .parquet file, or a folder of images by class."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image

from shoal.data.dataset import Dataset, ReadOptions, validate
from shoal.data.limits import MAX_IMAGE_PIXELS, check_memory
from shoal.data.prepare import Preparation, channel_moments, encode_labels, held_out_mask, normalise_labels
from shoal.data.text import detect_separator, join_names, open_utf8, refuse_non_utf8
from shoal.errors import UserError, escape_control_characters, quote_reason, shorten
from shoal.rng import derive_seed
from shoal.types import Samples

Array = NDArray[Any]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_IMAGE_MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGBA"}


@dataclass(frozen=True)
class _RawData:
    """The content of a file, before labels are numbered and features standardised."""

    x: Array
    labels: Array
    x_test: Array | None = None
    labels_test: Array | None = None
    owner: Array | None = None
    sensitive: Array | None = None
    edge: Array | None = None
    classes: tuple[str, ...] | None = None  # names of the labels 0, 1, ...
    columns: tuple[str, ...] | None = None  # name of each feature of a table
    unseen: frozenset[str] = frozenset()  # owners that are held out

    @property
    def is_unseen(self) -> NDArray[np.bool_]:
        """Whether each sample belongs to an owner that is held out."""
        if self.owner is None or not self.unseen:
            return np.zeros(len(self.x), dtype=bool)
        return np.array([str(owner) in self.unseen for owner in self.owner.tolist()])


def read_user_file(path: Path, options: ReadOptions) -> Dataset:
    """Reads a file or folder of a user, or raises a UserError that names the problem in one line."""
    try:
        return _read_by_suffix(path, options)
    except UserError as error:
        raise UserError(escape_control_characters(str(error))) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error


def _read_by_suffix(path: Path, options: ReadOptions) -> Dataset:
    if path.is_dir():
        return _to_dataset(path, _read_folder(path), options)
    readers: dict[str, Callable[[Path, ReadOptions], _RawData]] = {
        ".npz": _read_npz,
        ".csv": _read_table,
        ".parquet": _read_table,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"data {str(path)!r} ends in {path.suffix!r}, but it must be a folder or end in {', '.join(readers)}."
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    return _to_dataset(path, reader(path, options), options)


def _to_dataset(path: Path, raw: _RawData, options: ReadOptions) -> Dataset:
    where = str(path)
    if len(raw.x) != len(raw.labels):
        raise UserError(f"{where}: {len(raw.x)} samples but {len(raw.labels)} labels.")
    if raw.owner is not None and raw.owner.shape != (len(raw.x),):
        raise UserError(
            f"{where}: clients have shape {raw.owner.shape}, but there must be one per sample, {len(raw.x)}."
        )
    if raw.edge is not None and raw.edge.shape != (len(raw.x),):
        raise UserError(f"{where}: edges have shape {raw.edge.shape}, but there must be one per sample, {len(raw.x)}.")
    if raw.edge is not None and raw.owner is not None:
        _check_edges(where, raw.owner, raw.edge)
    if raw.sensitive is not None:
        raw = replace(raw, sensitive=_parse_sensitive(where, raw.sensitive, len(raw.x), options.sensitive_column))
    if raw.owner is not None and options.hold_out is not None:
        raw = replace(raw, unseen=options.hold_out.choose_owners([str(owner) for owner in raw.owner.tolist()]))
    _check_finite(where, raw.x, raw.columns)
    if raw.x_test is not None and raw.labels_test is not None:
        _check_finite(f"{where}: the test part", raw.x_test, raw.columns)
        return validate(_prepare_dataset(path, raw, raw.x_test, raw.labels_test))
    labels = normalise_labels(raw.labels, where)
    _, y = np.unique(labels, return_inverse=True)
    test = np.zeros(len(y), dtype=bool)
    test[~raw.is_unseen] = held_out_mask(
        y[~raw.is_unseen], options.test_fraction, derive_seed(options.seed, "files", "test")
    )
    train = _RawData(
        x=raw.x[~test],
        labels=labels[~test],
        owner=None if raw.owner is None else raw.owner[~test],
        sensitive=None if raw.sensitive is None else raw.sensitive[~test],
        edge=None if raw.edge is None else raw.edge[~test],
        classes=raw.classes,
        columns=raw.columns,
        unseen=raw.unseen,
    )
    return validate(_prepare_dataset(path, train, raw.x[test], labels[test]))


def _check_edges(where: str, owner: Array, edge: Array) -> None:
    edge_of_client: dict[str, str] = {}
    for client, edge_name in zip(map(str, owner.tolist()), map(str, edge.tolist()), strict=True):
        if edge_of_client.setdefault(client, edge_name) != edge_name:
            raise UserError(
                f"{where}: client {client!r} has samples under the edges {edge_of_client[client]!r} and {edge_name!r}. "
                "All its samples must have the same edge."
            )


def _prepare_dataset(path: Path, raw: _RawData, x_test: Array, labels_test: Array) -> Dataset:
    where = str(path)
    labels = normalise_labels(raw.labels, where)
    label_values = np.unique(labels) if raw.classes is None else np.arange(len(raw.classes))
    names = raw.classes or tuple(str(label) for label in label_values.tolist())
    if len(np.unique(labels)) < 2:
        raise UserError(f"{where}: training needs at least 2 classes, but every label is {str(labels[0])!r}.")
    if raw.classes is not None and (labels.dtype.kind not in "iu" or not np.isin(labels, label_values).all()):
        raise UserError(f"{where}: with names in classes, labels must be in 0..{len(names) - 1}.")
    test_labels = normalise_labels(labels_test, f"{where}: the test part")
    if test_labels.dtype.kind != labels.dtype.kind and "U" in (test_labels.dtype.kind, labels.dtype.kind):
        raise UserError(f"{where}: training labels are {labels.dtype} but test labels are {test_labels.dtype}.")
    encode_labels(test_labels, np.unique(labels), f"{where}: the test part")
    if x_test.shape[1:] != raw.x.shape[1:]:
        raise UserError(
            f"{where}: samples of the test part have shape {x_test.shape[1:]}, but they must have {raw.x.shape[1:]}."
        )
    _check_constant(where, raw.x, raw.columns)
    is_seen = ~raw.is_unseen
    is_open = is_seen if raw.sensitive is None else is_seen & ~raw.sensitive
    # The moments are stored with a run, so they must not reveal sensitive samples.
    moments = channel_moments(raw.x[is_open if is_open.any() else is_seen])
    preparation = Preparation.from_moments(
        moments,
        double=True,
        white=255.0 if raw.x.ndim == 4 and raw.x.dtype == np.uint8 else None,
        columns=raw.columns,
    )
    return Dataset(
        name=path.stem if path.is_file() else path.name,
        train=Samples(preparation(raw.x), torch.from_numpy(encode_labels(labels, label_values, where))),
        test=Samples(preparation(x_test), torch.from_numpy(encode_labels(test_labels, label_values, where))),
        classes=names,
        owner=None if raw.owner is None else tuple(str(owner) for owner in raw.owner.tolist()),
        is_sensitive=None if raw.sensitive is None else torch.from_numpy(raw.sensitive),
        edge=None if raw.edge is None else tuple(str(edge) for edge in raw.edge.tolist()),
        preparation=preparation,
        unseen=raw.unseen,
    )


def _parse_sensitive(where: str, column: Array, num_samples: int, name: str | None) -> NDArray[np.bool_]:
    """Returns whether each sample is sensitive, from numbers 0 and 1, truth values, or these as text."""
    words = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
    if column.shape != (num_samples,):
        raise UserError(
            f"{where}: {name!r} has shape {column.shape}, but there must be one value per sample, {num_samples}."
        )
    texts = [str(value).strip().lower() for value in column.tolist()]
    unknown = next((value for value in texts if value not in words), None)
    if unknown is not None:
        raise UserError(f"{where}: {unknown!r} in {name!r} does not say whether a sample is sensitive. Use 0 and 1.")
    return np.array([words[value] for value in texts])


_MAX_FEATURE = 1e30  # squares of larger numbers exceed float32


def _check_finite(where: str, x: Array, columns: Sequence[str] | None) -> None:
    if x.size == 0:
        raise UserError(f"{where} has no samples or no features.")
    bad = ~np.isfinite(x) | (np.abs(x) > _MAX_FEATURE) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    if not bad.any():
        return
    if x.ndim > 2:
        raise UserError(f"{where}: {int(bad.sum())} features are NaN, infinite or beyond 1e30.")
    first = int(np.flatnonzero(bad.any(axis=0))[0])
    column = columns[first] if columns else str(first)
    raise UserError(
        f"{where}: column {column!r} has {int(bad[:, first].sum())} values that are "
        "missing, NaN, infinite or beyond 1e30. Fill them in or remove those rows."
    )


def _check_constant(where: str, x: Array, columns: Sequence[str] | None) -> None:
    if x.min() == x.max():
        raise UserError(f"{where}: every feature is the same number, {x.flat[0]}.")
    if columns is None:
        return
    column_varies: dict[str, bool] = {}  # a column of lists has several features
    for column, feature_varies in zip(columns, x.min(axis=0) != x.max(axis=0), strict=True):
        column_varies[column] = column_varies.get(column, False) or bool(feature_varies)
    constant = [column for column, varies in column_varies.items() if not varies]
    if constant:
        raise UserError(
            f"{where}: column {constant[0]!r} is the same number in every training row, so it carries no information. "
            f"Leave it out with --drop-column {constant[0]}."
        )


_FEATURE_ARRAYS, _LABEL_ARRAYS = ("x", "X", "images"), ("y", "Y", "labels")


def _read_npz(path: Path, options: ReadOptions) -> _RawData:
    arrays = _load_arrays(path)
    x, y = _first_array(path, arrays, _FEATURE_ARRAYS), _first_array(path, arrays, _LABEL_ARRAYS)
    has_test = any(f"{name}_test" in arrays for name in _FEATURE_ARRAYS + _LABEL_ARRAYS)
    client = options.client_column or "client"
    if options.client_column and client not in arrays:
        raise UserError(f"{path}: there is no client array {client!r}; the arrays are {join_names(arrays)}.")
    sensitive = options.sensitive_column
    if sensitive and sensitive not in arrays:
        raise UserError(f"{path}: there is no sensitive array {sensitive!r}; the arrays are {join_names(arrays)}.")
    edge = options.edge_column
    if edge and edge not in arrays:
        raise UserError(f"{path}: there is no edge array {edge!r}; the arrays are {join_names(arrays)}.")
    names = arrays.get("classes")
    return _RawData(
        x=_channels_first(path, x),
        labels=y,
        x_test=_channels_first(path, _first_array(path, arrays, _FEATURE_ARRAYS, "_test")) if has_test else None,
        labels_test=_first_array(path, arrays, _LABEL_ARRAYS, "_test") if has_test else None,
        owner=arrays.get(client),
        sensitive=arrays[sensitive] if sensitive else None,
        edge=arrays[edge] if edge else None,
        classes=None if names is None else tuple(str(name) for name in names.tolist()),
    )


def _load_arrays(path: Path) -> dict[str, Array]:
    with path.open("rb") as stream:
        if stream.read(6) == b"\x93NUMPY":
            raise UserError(f"{path} contains a single array (.npy), but it must be an .npz file with x and y.")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: truncated or not an .npz file.")
    _check_members(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            contents = ((name, file[name]) for name in file.files)
            return {name: array for name, array in contents if isinstance(array, np.ndarray)}
    except MemoryError as error:
        raise UserError(f"{path}: its arrays do not fit into memory: {error}.") from error
    except Exception as error:  # zipfile, zlib and NumPy each raise errors of their own for damaged files
        reason = shorten(str(error) or type(error).__name__)
        if "Object arrays" in reason:
            raise UserError(
                f"{path}: {reason}: arrays of Python objects are refused. Save numbers or fixed-length text."
            ) from error
        raise UserError(f"{path}: truncated or not an .npz file: {reason}.") from error


def _check_members(path: Path) -> None:
    """Refuses arrays that are much larger than the file, or larger than their headers say.

    NumPy allocates what the header of an array announces, and zipfile what a member decompresses to.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_memory(path, sum(member.file_size for member in members), path.stat().st_size)
            announced = {member: _announced_bytes(archive, member) for member in members}
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy each raise errors of their own for damaged files
        raise UserError(f"{path}: truncated or not an .npz file: {quote_reason(error)}.") from error
    for member, (num_payload, num_announced) in announced.items():
        if num_announced is not None and num_announced != num_payload:
            raise UserError(
                f"{path}: its array {member.filename.removesuffix('.npy')} has {num_payload} bytes, but its header "
                f"announces {num_announced}."
            )


def _announced_bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, int | None]:
    """Returns the bytes after the header of an array, and those that the header announces, if it has numbers."""
    with archive.open(member) as stream:
        if stream.read(6) != b"\x93NUMPY":
            return member.file_size, None
        stream.seek(0)
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
        return member.file_size - stream.tell(), None if dtype.hasobject else math.prod(shape) * dtype.itemsize


def _first_array(path: Path, arrays: dict[str, Array], names: Sequence[str], suffix: str = "") -> Array:
    allowed = [name + suffix for name in names]
    array = next((arrays[name] for name in allowed if name in arrays), None)
    if array is None:
        raise UserError(
            f"{path}: one of the arrays {', '.join(allowed)} is needed; the arrays are {join_names(arrays)}."
        )
    return array


def _channels_first(path: Path, x: Array) -> Array:
    """Returns images [N, H, W] and [N, H, W, C] as [N, C, H, W], and tables [N, features] unchanged."""
    if x.dtype.kind not in "buif":
        raise UserError(f"{path}: features are of type {x.dtype}, but they must be numbers.")
    if x.dtype.kind == "b":
        x = x.astype(np.uint8)
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        channels = (1, 3, 4)
        return x.transpose(0, 3, 1, 2) if x.shape[3] in channels and x.shape[1] not in channels else x
    if x.ndim != 2:
        raise UserError(
            f"{path}: features have {x.ndim} axes, "
            "but they must be a table [N, F] or images [N, H, W], [N, H, W, C] or [N, C, H, W]."
        )
    return x


def _read_table(path: Path, options: ReadOptions) -> _RawData:
    table = _load_table(path)
    names = _column_names(path, table)
    duplicate, count = next(((name, n) for name, n in Counter(names).items() if n > 1), (None, 0))
    if duplicate is not None:
        raise UserError(f"{path}: there are {count} columns named {duplicate!r}; rename all but one.")
    for kind, name in (
        ("label", options.label_column),
        ("client", options.client_column),
        ("sensitive", options.sensitive_column),
        ("edge", options.edge_column),
        *(("drop", name) for name in options.drop_columns),
    ):
        if name is not None and name not in names:
            hint = " Is the file separated by something other than commas?" if len(names) == 1 else ""
            raise UserError(f"{path}: there is no {kind} column {name!r}; the columns are {join_names(names)}.{hint}")
    if table.num_rows == 0:
        raise UserError(f"{path}: the file has columns but no rows.")
    if options.label_column == options.sensitive_column:
        raise UserError(f"{path}: column {options.label_column!r} is the label, so it cannot mark sensitive samples.")
    if options.label_column in options.drop_columns:
        raise UserError(f"{path}: column {options.label_column!r} is the label, so it cannot be dropped.")
    if options.label_column == options.edge_column:
        raise UserError(f"{path}: column {options.label_column!r} is the label, so it cannot name edges.")
    non_features = {
        *(options.label_column, options.client_column, options.sensitive_column, options.edge_column),
        *options.drop_columns,
    }
    features = [name for name in names if name not in non_features]
    if not features:
        raise UserError(f"{path}: no feature columns are left; the columns are {join_names(names)}.")
    blocks = [_read_feature_column(path, name, table.column(name)) for name in features]
    return _RawData(
        x=np.concatenate(blocks, axis=1),
        labels=_read_key_column(path, table, "label", options.label_column),
        owner=_read_key_column(path, table, "client", options.client_column) if options.client_column else None,
        sensitive=_read_key_column(path, table, "sensitivity", options.sensitive_column)
        if options.sensitive_column
        else None,
        edge=_read_key_column(path, table, "edge", options.edge_column) if options.edge_column else None,
        columns=tuple(name for name, block in zip(features, blocks, strict=True) for _ in range(block.shape[1])),
    )


def _load_table(path: Path) -> pa.Table:
    try:
        return _load_csv(path) if path.suffix.lower() == ".csv" else _load_parquet(path)
    except (pa.ArrowException, OSError, OverflowError) as error:
        if path.suffix.lower() == ".csv":
            refuse_non_utf8(path)
        reason = shorten(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise UserError(f"{path}: cannot be read as a {path.suffix[1:]} table: {reason}.") from error


def _load_csv(path: Path) -> pa.Table:
    with open_utf8(path) as file:
        return pa.csv.read_csv(file, parse_options=pa.csv.ParseOptions(delimiter=detect_separator(file)))


_BATCH_ROWS = 1024


def _load_parquet(path: Path) -> pa.Table:
    """Reads a parquet file in batches, because its columns may repeat a value without any bytes on disk."""
    with pa.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        num_values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
        check_memory(path, num_values * 8, path.stat().st_size)  # features become numbers of 8 bytes
        check_memory(path, sum(group.total_byte_size for group in groups), path.stat().st_size)
        batches, num_bytes = [], 0
        for batch in file.iter_batches(_BATCH_ROWS):
            num_bytes += batch.nbytes
            check_memory(path, num_bytes, path.stat().st_size)
            batches.append(batch)
        return pa.Table.from_batches(batches, file.schema_arrow)


def _column_names(path: Path, table: pa.Table) -> list[str]:
    try:
        names: list[str] = table.column_names
    except UnicodeDecodeError as error:
        raise _not_utf8_error(path, "the name of a column") from error
    if any("\0" in name for name in names):
        raise _not_utf8_error(path, "the name of a column")
    return names


def _not_utf8_error(path: Path, location: str) -> UserError:
    """Returns the error for text that is not UTF-8. For a CSV file it raises an error with line and byte instead."""
    if path.suffix.lower() == ".csv":
        refuse_non_utf8(path)
    return UserError(f"{path}: {location} is not UTF-8 text. Save the file as UTF-8.")


_NUMBER_TYPES = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    *(pa.types.is_boolean, pa.types.is_null),
)


def _read_feature_column(path: Path, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Returns [rows, 1] for numbers, and [rows, k] for lists of k numbers. A missing number is NaN."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pa.compute.unique(pa.compute.list_value_length(column)).to_pylist()
        if None in lengths or len(lengths) != 1:
            raise UserError(
                f"{path}: the lists in column {name!r} differ in length, but all must have the same length."
            )
        flat = _read_feature_column(path, name, pa.compute.list_flatten(column))
        return flat.reshape(len(column), -1)
    if not any(is_number(kind) for is_number in _NUMBER_TYPES):
        raise UserError(
            f"{path}: column {name!r} is of type {kind}, but features must be numbers. "
            f"Convert it to numbers, leave it out with --drop-column {name}, "
            f"or use --client-column {name} if it names the client of a row."
        )
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    filled = column.cast(pa.float64(), safe=False).fill_null(float("nan"))
    return np.asarray(filled.to_numpy(), dtype=np.float64)[:, None]


def _read_key_column(path: Path, table: pa.Table, kind: str, name: str) -> Array:
    """Returns a column of labels, clients, sensitivity or edges, without missing values."""
    column = table.column(name)
    if column.null_count:
        raise UserError(f"{path}: {column.null_count} rows have no {kind} in column {name!r}.")
    _check_key_lengths(path, column, kind, name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        raise _not_utf8_error(path, f"column {name!r}")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return np.asarray(column.to_numpy())
    try:
        keys = np.array(column.to_pylist(), dtype=np.str_)
    except UnicodeDecodeError as error:  # a parquet file is not checked when it is read
        raise _not_utf8_error(path, f"column {name!r}") from error
    num_empty = int((np.char.strip(keys) == "").sum())
    if num_empty:
        raise UserError(f"{path}: {num_empty} rows have an empty {kind} in column {name!r}.")
    return keys


_MAX_KEY_BYTES = 1000  # NumPy gives every row the width of the longest text


def _check_key_lengths(path: Path, column: pa.ChunkedArray, kind: str, name: str) -> None:
    is_dictionary = pa.types.is_dictionary(column.type)
    value_type = column.type.value_type if is_dictionary else column.type
    if not (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
        return
    for chunk in column.chunks:
        longest = pa.compute.max(pa.compute.binary_length(chunk.dictionary if is_dictionary else chunk)).as_py() or 0
        if longest > _MAX_KEY_BYTES:
            raise UserError(
                f"{path}: column {name!r} has a {kind} of {longest} bytes, but it may have at most {_MAX_KEY_BYTES}."
            )


def _read_folder(path: Path) -> _RawData:
    train, test = path / "train", path / "test"
    if train.is_dir() and test.is_dir():
        x, labels, image_format = _read_classes(train, None)
        x_test, labels_test, _ = _read_classes(test, image_format)
        return _RawData(x, labels, x_test, labels_test)
    x, labels, _ = _read_classes(path, None)
    return _RawData(x, labels)


_ImageFormat = tuple[Path, tuple[int, int], str]  # the first image, and its size and mode, which all images must have


def _read_classes(folder: Path, expected_format: _ImageFormat | None) -> tuple[Array, Array, _ImageFormat]:
    images, labels, num_file_bytes = [], [], 0
    for class_folder in sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."):
        files = sorted(file for file in class_folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise UserError(f"{class_folder}: a class folder without any image ({', '.join(IMAGE_SUFFIXES)}).")
        for file in files:
            pixels, image_format = _read_image(file)
            expected_format = expected_format or image_format
            if image_format[1:] != expected_format[1:]:
                raise UserError(
                    f"{file} is {_describe_format(image_format)}, but {expected_format[0]} is "
                    f"{_describe_format(expected_format)}. All images must have the same size and mode."
                )
            images.append(pixels)
            num_file_bytes += file.stat().st_size
            check_memory(folder, len(images) * pixels.nbytes, num_file_bytes)
            labels.append(class_folder.name)
    if expected_format is None or not images:
        raise UserError(f"{folder}: no images in it. They are expected as class/*.png (or .jpg, .jpeg).")
    return np.stack(images), np.array(labels), expected_format


def _describe_format(image_format: _ImageFormat) -> str:
    (width, height), mode = image_format[1:]
    return f"{width} x {height} {mode}"


def _read_image(file: Path) -> tuple[NDArray[np.uint8], _ImageFormat]:
    """Reads an image as [C, H, W], with its format."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
            image = Image.open(file)
        with image:
            if math.prod(image.size) > MAX_IMAGE_PIXELS:
                raise UserError(
                    f"{file}: it has {image.size[0]} x {image.size[1]} pixels, but an image may have at most "
                    f"{MAX_IMAGE_PIXELS} pixels. Make it smaller."
                )
            if image.mode not in _IMAGE_MODES:
                raise UserError(f"{file}: mode {image.mode} is not one of {', '.join(_IMAGE_MODES)}.")
            pixels = np.asarray(image.convert(_IMAGE_MODES[image.mode]))
            image_format = (file, image.size, image.mode)
    except UserError:
        raise
    except Exception as error:  # Pillow raises errors of many kinds for damaged files
        raise UserError(f"{file}: not a complete image: {shorten(str(error))}.") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), image_format
