"""Bearer tokens of the prediction service. Only their hashes are stored.

A token has 32 random bytes and cannot be guessed, so one round of SHA-256 is enough and a slow hash is not needed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import UserError

TOKENS_VARIABLE = "SHOAL_TOKENS"  # the lines of a token file, separated by commas
_LINE = re.compile(r"([\w.@-]{1,64})\s+([0-9a-f]{64})")


def hash_token(token: str) -> str:
    """Returns the hash that is stored instead of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token(name: str, path: Path) -> str:
    """Returns a new token for `name` and adds its hash to the file, which only its owner can read."""
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise UserError(f"name is {name!r}. It must have 1 to 64 letters, digits, or characters of . @ - _")
    text = _read_text(path) if path.exists() else ""
    if name in read_tokens(text.splitlines(), str(path)):
        raise UserError(f"name is {name!r}, but {path} already has a token of that name. Remove its line first.")
    token = f"shoal_{secrets.token_urlsafe(32)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as file:
        line_break = "" if text.endswith("\n") or not text else "\n"  # some editors leave out the last line break
        file.write(f"{line_break}{name} {hash_token(token)}\n")
    return token


def _read_text(path: Path) -> str:
    """Returns the text of a token file. Bytes that are not text are replaced, so that their line is refused."""
    return path.read_bytes().decode(errors="replace")


def read_tokens(lines: Iterable[str], source: str) -> dict[str, str]:
    """Returns the hash of every name, from lines of the form NAME HASH. The rest of a line after # is a comment."""
    hashes: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(
                f"{source}, line {number} does not have the form NAME HASH. `shoal token NAME` makes such a line."
            )
        hashes[match[1]] = match[2]
    return hashes


def load_tokens(path: Path | None) -> dict[str, str]:
    """Returns the hash of every name, from the environment and from the file (if one is given)."""
    hashes = read_tokens(os.environ.get(TOKENS_VARIABLE, "").split(","), TOKENS_VARIABLE)
    if path is not None:
        if not path.is_file():
            raise UserError(f"tokens is {str(path)!r}, but there is no such file. `shoal token NAME` makes one.")
        hashes |= read_tokens(_read_text(path).splitlines(), str(path))
        if not hashes:
            raise UserError(f"{path} has no tokens. `shoal token NAME --file {path}` adds one.")
    return hashes


def find_token_name(tokens: Mapping[str, str], header: str) -> str | None:
    """Returns the name that belongs to the token of an Authorization header, or None.

    Every hash is compared, each in constant time, so that the duration reveals nothing about the tokens.
    """
    scheme, _, token = header.partition(" ")
    given_hash, matching_name = hash_token(token.strip()), None
    for name, known_hash in tokens.items():
        if hmac.compare_digest(given_hash, known_hash) and scheme.lower() == "bearer":
            matching_name = name
    return matching_name
