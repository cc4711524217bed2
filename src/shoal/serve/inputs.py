"""Converts what a caller sends (numbers, a .npy array or an image) to the input tensor of a model."""

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
from shoal.errors import UserError, shorten

MAX_SAMPLES = 1024  # in one request
MAX_VALUE = 1e30  # as for training data, because squares of larger numbers overflow float32
IMAGES = {"image/png": "PNG", "image/jpeg": "JPEG"}
IMAGE_MODES = {
    1: {"1": "L", "L": "L"},
    3: {"RGB": "RGB", "P": "RGB"},
    4: {"RGBA": "RGBA"},
}  # number of channels -> mode of the image -> mode to convert it to
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
    """Input that the models of this run cannot take."""

    def __init__(self, field: str, sentence: str, is_malformed: bool = False) -> None:
        super().__init__(sentence)
        self.field, self.is_malformed = field, is_malformed


@dataclass(frozen=True)
class Inputs:
    """The inputs and the classes of the models of a run."""

    shape: tuple[int, ...]  # of one sample
    classes: tuple[str, ...]
    preparation: Preparation | None = None  # None if values are used as they are

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns if the data are a table."""
        return None if self.preparation is None else self.preparation.columns

    @property
    def takes_images(self) -> bool:
        """Whether a sample can be sent as a PNG or JPEG image."""
        white = None if self.preparation is None else self.preparation.white
        return len(self.shape) == 3 and self.shape[0] in IMAGE_MODES and white is not None

    def to_tensor(self, values: Any, prepared: bool = False) -> Tensor:
        """Returns a tensor [samples, *shape], prepared like the training data. Raises `InvalidInput`."""
        batch = self._to_batch(_to_array(values))
        _check_finite(batch)
        if self.preparation is None or prepared:
            x = torch.from_numpy(batch.astype(np.float32))
        else:
            x = self.preparation(batch)
        if not np.isfinite(x.numpy()).all():
            raise InvalidInput(
                "samples", "samples has a value that is too large for single precision after preparation."
            )
        return x

    def _to_batch(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns a batch. A single sample becomes a batch of one, and the axis of a single channel may be missing."""
        shape_without_channel = self.shape[1:] if len(self.shape) == 3 and self.shape[0] == 1 else self.shape
        for shape in (self.shape, shape_without_channel):
            if values.shape == shape:
                return values.reshape(1, *self.shape)
            if values.ndim == len(shape) + 1 and values.shape[1:] == shape:
                if not 1 <= len(values) <= MAX_SAMPLES:
                    raise InvalidInput(
                        "samples", f"samples has {len(values)} samples. It must have 1 to {MAX_SAMPLES}."
                    )
                return values.reshape(-1, *self.shape)
        names = f" ({', '.join(self.columns)})" if self.columns else ""
        raise InvalidInput(
            "samples",
            f"samples has the shape {_shape_text(values.shape)}. It must have the shape {_shape_text(self.shape)} for "
            f"one sample{names}, or N x {_shape_text(self.shape)} for N samples.",
        )

    def read_npy(self, body: bytes) -> NDArray[Any]:
        """Returns the array of a .npy file. Raises `InvalidInput`.

        The header is checked first, so that nothing is allocated that was not sent, and nothing is unpickled.
        """
        stream = io.BytesIO(body)
        try:
            version = npy.read_magic(stream)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, by_columns, dtype = read(stream)
        except Exception as error:  # NumPy parses the header as Python, which fails in many ways
            raise InvalidInput("body", f"body is not a .npy array: {_first_line(error)}", is_malformed=True) from None
        if dtype.hasobject or dtype.kind not in "buif":
            raise InvalidInput(
                "body", f"body has an array of type {dtype}. It must be an array of numbers, such as float32 or uint8."
            )
        num_payload_bytes = len(body) - stream.tell()
        if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != num_payload_bytes:
            raise InvalidInput(
                "body",
                f"body has {num_payload_bytes} bytes after its header, which says {_shape_text(shape)} of {dtype}.",
                True,
            )
        flat = np.frombuffer(body, dtype, offset=stream.tell()) if num_payload_bytes else np.empty(0, dtype)
        try:
            return flat.reshape(shape, order="F" if by_columns else "C")
        except (ValueError, OverflowError) as error:  # no samples, but of endless size
            raise InvalidInput("body", f"body is not a .npy array: {_first_line(error)}", is_malformed=True) from None

    def read_image(self, body: bytes, media: str) -> NDArray[Any]:
        """Returns the pixels [channels, height, width] of an image. Raises `InvalidInput`.

        Size and mode are checked in the header, so that nothing large is ever decompressed.
        """
        if not self.takes_images or self.preparation is None or self.preparation.white is None:
            raise InvalidInput(
                "body",
                f"body is an image, but this model takes {_shape_text(self.shape)} numbers. Send JSON or a .npy array.",
            )
        (channels, height, width), white = self.shape, self.preparation.white
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(body), formats=[IMAGES[media]])
            if image.size != (width, height) or image.mode not in IMAGE_MODES[channels]:
                raise InvalidInput(
                    "body",
                    f"body is an image of {image.size[0]} x {image.size[1]} "
                    f"{MODE_NAMES.get(image.mode, f'of mode {image.mode}')}. It must be "
                    f"{width} x {height} {CHANNEL_NAMES[channels]}.",
                )
            pixels = np.asarray(image.convert(IMAGE_MODES[channels][image.mode]))
        except InvalidInput:
            raise
        except UnidentifiedImageError:
            raise InvalidInput(
                "body", f"body is not a complete {IMAGES[media]} image: it has no header of one.", True
            ) from None
        except Exception as error:  # image decoders fail in many ways, and none of them is an error of the server
            raise InvalidInput(
                "body", f"body is not a complete {IMAGES[media]} image: {_first_line(error)}", True
            ) from None
        channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return channels_first if white == 255 else channels_first.astype(np.float64) * (white / 255)


def _to_array(values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise InvalidInput("samples", "samples has lists that differ in length. They must form an array.") from None
    if array.dtype.kind not in "buif":
        raise InvalidInput("samples", "samples has a value that is not a number. All values must be numbers.")
    return array


def _check_finite(batch: NDArray[Any]) -> None:
    if batch.dtype.kind != "f":
        return
    bad = ~(np.abs(batch) <= MAX_VALUE)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        value = float(batch[index])
        position = "".join(f"[{i}]" for i in index)
        raise InvalidInput(
            "samples", f"samples{position} is {value}. It must be a finite number of at most {MAX_VALUE:g}."
        )


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _first_line(error: Exception) -> str:
    return shorten((str(error).splitlines() or [type(error).__name__])[0])
