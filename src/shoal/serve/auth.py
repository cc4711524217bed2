"""Who may ask: bearer tokens, of which only hashes are kept.

A token is 32 random bytes, so one round of SHA-256 is enough: there is nothing to guess that a slow hash would guard.
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

TOKENS_VARIABLE = "SHOAL_TOKENS"  # lines as in a file of tokens, separated by commas
_LINE = re.compile(r"([\w.@-]{1,64})\s+([0-9a-f]{64})")


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token(name: str, path: Path) -> str:
    """A fresh token for `name`; its hash is added to the file, which only its owner can read."""
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise UserError(f"name is {name!r}; it must be up to 64 letters, digits, or one of . @ - _")
    text = _read_text(path) if path.exists() else ""
    if name in read_tokens(text.splitlines(), str(path)):
        raise UserError(f"name is {name!r}, but {path} has a token of that name; remove its line first")
    token = f"shoal_{secrets.token_urlsafe(32)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as file:
        begin = "" if text.endswith("\n") or not text else "\n"  # some editors leave the last line unended
        file.write(f"{begin}{name} {hash_token(token)}\n")
    return token


def _read_text(path: Path) -> str:
    """The content of a file of tokens. What is no text becomes a line that is none of a token."""
    return path.read_bytes().decode(errors="replace")


def read_tokens(lines: Iterable[str], source: str) -> dict[str, str]:
    """Name -> hash, from lines `NAME HASH`; what follows # is a comment."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{source}, line {number}: not of the form NAME HASH; `shoal token NAME` makes such a line")
        found[match[1]] = match[2]
    return found


def load_tokens(path: Path | None) -> dict[str, str]:
    """Of the file and of the environment, together."""
    named = read_tokens(os.environ.get(TOKENS_VARIABLE, "").split(","), TOKENS_VARIABLE)
    if path is not None:
        if not path.is_file():
            raise UserError(f"tokens is {str(path)!r}, but there is no such file; `shoal token NAME` makes one")
        named |= read_tokens(_read_text(path).splitlines(), str(path))
        if not named:
            raise UserError(f"{path} holds no token; `shoal token NAME --file {path}` adds one")
    return named


def find_token_name(tokens: Mapping[str, str], header: str) -> str | None:
    """Whose token it is. Every hash is compared, each in constant time: how long it took says nothing."""
    scheme, _, token = header.partition(" ")
    given, found = hash_token(token.strip()), None
    for name, known_hash in tokens.items():
        if hmac.compare_digest(given, known_hash) and scheme.lower() == "bearer":
            found = name
    return found
