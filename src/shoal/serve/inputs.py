"""From what a caller sends (numbers, a .npy array, an image) to the rows that a model is given."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from shoal.data.prepare import Preparation
from shoal.errors import UserError

MAX_SAMPLES = 1024  # of one request
MAX_VALUE = 1e30  # as for training data: squares of larger numbers leave what float32 can hold
IMAGES = {"image/png": "PNG", "image/jpeg": "JPEG"}
IMAGE_MODES = {1: {"1": "L", "L": "L"}, 3: {"RGB": "RGB", "P": "RGB"}, 4: {"RGBA": "RGBA"}}  # by channels: from -> to
CHANNEL_NAMES = {1: "grey", 3: "in colour", 4: "in colour with transparency"}
MODE_NAMES = {
    "1": "black and white",
    "L": CHANNEL_NAMES[1],
    "LA": "grey with transparency",
    "I;16": "grey of 16 bits",
    "P": CHANNEL_NAMES[3],
    "RGB": CHANNEL_NAMES[3],
    "RGBA": CHANNEL_NAMES[4],
}


class InvalidInput(UserError):
    """Input that no model of this run can be given."""

    def __init__(self, field: str, sentence: str, is_malformed: bool = False) -> None:
        super().__init__(sentence)
        self.field, self.is_malformed = field, is_malformed


@dataclass(frozen=True)
class Inputs:
    """What the models of a run are given, and what they answer."""

    shape: tuple[int, ...]  # of one row
    classes: tuple[str, ...]
    preparation: Preparation | None = None  # None: values are taken as they are

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Of a table: what each number of a row is called."""
        return None if self.preparation is None else self.preparation.columns

    @property
    def takes_images(self) -> bool:
        white = None if self.preparation is None else self.preparation.white
        return len(self.shape) == 3 and self.shape[0] in IMAGE_MODES and white is not None

    def to_tensor(self, values: Any, prepared: bool = False) -> Tensor:
        """[rows, *shape], prepared as the training data were."""
        rows = self._to_batch(_to_array(values))
        _check_finite(rows)
        if self.preparation is None or prepared:
            x = torch.from_numpy(rows.astype(np.float32))
        else:
            x = self.preparation(rows)
        if not np.isfinite(x.numpy()).all():
            raise InvalidInput("rows", "rows: a value is too large for single precision once it is prepared")
        return x

    def _to_batch(self, values: NDArray[Any]) -> NDArray[Any]:
        """One row becomes a batch of one; the axis of a single channel may be left out."""
        shape_without_channel = self.shape[1:] if len(self.shape) == 3 and self.shape[0] == 1 else self.shape
        for shape in (self.shape, shape_without_channel):
            if values.shape == shape:
                return values.reshape(1, *self.shape)
            if values.ndim == len(shape) + 1 and values.shape[1:] == shape:
                if not 1 <= len(values) <= MAX_SAMPLES:
                    raise InvalidInput("rows", f"rows: there are {len(values)}, but there must be 1 to {MAX_SAMPLES}")
                return values.reshape(-1, *self.shape)
        names = f" ({', '.join(self.columns)})" if self.columns else ""
        raise InvalidInput(
            "rows",
            f"rows: the shape is {_shape_text(values.shape)}, but must be {_shape_text(self.shape)} for one row{names}, "
            f"or N x {_shape_text(self.shape)} for N",
        )

    def read_npy(self, body: bytes) -> NDArray[Any]:
        """The header is read and checked by itself: nothing is allocated that was not sent, and nothing unpickled."""
        stream = io.BytesIO(body)
        try:
            version = npy.read_magic(stream)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, by_columns, dtype = read(stream)
        except (ValueError, EOFError, SyntaxError, TypeError) as error:
            raise InvalidInput("body", f"body: not an .npy array: {_first_line(error)}", is_malformed=True) from None
        if dtype.hasobject or dtype.kind not in "buif":
            raise InvalidInput(
                "body", f"body: the array is of type {dtype}, but must be of numbers, such as float32 or uint8"
            )
        num_payload_bytes = len(body) - stream.tell()
        if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != num_payload_bytes:
            raise InvalidInput(
                "body",
                f"body: {num_payload_bytes} bytes follow the header, which announces {_shape_text(shape)} of {dtype}",
                True,
            )
        flat = np.frombuffer(body, dtype, offset=stream.tell())
        return flat.reshape(shape, order="F" if by_columns else "C")

    def read_image(self, body: bytes, media: str) -> NDArray[Any]:
        """[C, H, W]. Size and mode are known from the header, so that nothing large is ever decompressed."""
        if not self.takes_images or self.preparation is None or self.preparation.white is None:
            raise InvalidInput(
                "body", f"body: this model takes {_shape_text(self.shape)} numbers, not images: send JSON or .npy"
            )
        (channels, height, width), white = self.shape, self.preparation.white
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(body), formats=[IMAGES[media]])
            if image.size != (width, height) or image.mode not in IMAGE_MODES[channels]:
                raise InvalidInput(
                    "body",
                    f"body: the image is {image.size[0]} x {image.size[1]} "
                    f"{MODE_NAMES.get(image.mode, f'of mode {image.mode}')}, but must be "
                    f"{width} x {height} {CHANNEL_NAMES[channels]}",
                )
            pixels = np.asarray(image.convert(IMAGE_MODES[channels][image.mode]))
        except InvalidInput:
            raise
        except UnidentifiedImageError:
            raise InvalidInput(
                "body", f"body: not a whole {IMAGES[media]} image: it does not begin like one", True
            ) from None
        except Exception as error:  # decoders of images fail in many ways, and none is the server's fault
            raise InvalidInput("body", f"body: not a whole {IMAGES[media]} image: {_first_line(error)}", True) from None
        whole = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return whole if white == 255 else whole.astype(np.float64) * (white / 255)


def _to_array(values: Any) -> NDArray[Any]:
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        raise InvalidInput("rows", "rows: the lists differ in length; they must make up an array") from None
    if found.dtype.kind not in "buif":
        raise InvalidInput("rows", "rows: a value is not a number; all must be numbers")
    return found


def _check_finite(rows: NDArray[Any]) -> None:
    if rows.dtype.kind != "f":
        return
    bad = ~(np.abs(rows) <= MAX_VALUE)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        value = float(rows[place])
        where = "".join(f"[{i}]" for i in place)
        raise InvalidInput("rows", f"rows{where} is {value}; it must be a finite number, at most {MAX_VALUE:g}")


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
