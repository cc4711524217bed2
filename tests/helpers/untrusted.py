"""Checks of readers of untrusted content: the result is a value or one UserError of one line, in bounded memory."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shoal.errors import MAX_SENTENCE, UserError


def seeded(num_examples: int) -> settings:
    """Returns settings with the same examples in every run, so that a failure is not an accident of the draw."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def value_or_user_error(read: Callable[..., Any], *arguments: Any, without: str = "") -> Any:
    """Returns the value, or the UserError. Any other exception fails the test, and so does an unprintable sentence.

    `without` is a text, such as the folder of a test, that is not counted as part of the sentence.
    """
    try:
        return read(*arguments)
    except UserError as error:
        text = str(error).replace(without, "") if without else str(error)
        assert text.isprintable(), repr(text)
        assert len(text) <= MAX_SENTENCE, len(text)
        return error


def peak_bytes(act: Callable[[], Any]) -> int:
    """Returns the largest memory that Python and NumPy held during the call, in bytes."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@st.composite
def damaged(draw: st.DrawFn, *undamaged: bytes) -> bytes:
    """Draws any bytes, or one of these contents in which some bytes are changed, removed or added."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(undamaged)))
    for _ in range(draw(st.integers(1, 4))):
        start, num_replaced = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 1, 2, 4, len(data)]))
        data[start : start + num_replaced] = draw(st.binary(max_size=4))
    return bytes(data)


def mutated_texts(words: Sequence[str], joiners: Sequence[str] = ("", " ", "\n")) -> st.SearchStrategy[str]:
    """Returns a strategy of texts: words of the format and arbitrary text in any order."""
    part = st.sampled_from(words) | st.text(max_size=6)
    return st.tuples(st.lists(part, max_size=12), st.sampled_from(joiners)).map(lambda drawn: drawn[1].join(drawn[0]))


def to_bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    """Returns what `write` writes."""
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()
