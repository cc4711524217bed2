"""Limits of what a file may become in memory. A small file can unpack to more than any machine has."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import UserError

ALWAYS_BYTES = 2**30  # what every file may have in memory
MAX_RATIO = 100  # a file that needs more memory than that may need this many times its size on disk
MAX_IMAGE_PIXELS = 2**24  # of one image


def allowed_bytes(num_file_bytes: int) -> int:
    """Returns how many bytes the content of files of this size may have in memory."""
    return max(ALWAYS_BYTES, MAX_RATIO * num_file_bytes)


def check_memory(path: Path, num_bytes: int, num_file_bytes: int) -> None:
    """Raises a UserError if the content would have many more bytes in memory than on disk.

    Parameters
    ----------
    path
        The file or folder, for the error.
    num_bytes
        Bytes that the content has in memory, or will have.
    num_file_bytes
        Bytes of the file, or of all files of the folder.
    """
    if num_bytes > allowed_bytes(num_file_bytes):
        raise UserError(
            f"{path}: its content would have {num_bytes} bytes in memory, which is more than {MAX_RATIO} times its size"
            f" of {num_file_bytes} bytes. Save it with less compression if it is what you want."
        )
