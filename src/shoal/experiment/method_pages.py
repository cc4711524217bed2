"""Writes the generated blocks of docs/methods/*.md: what leaves the client, the options and the deviations.

Each page has text written by hand and blocks between `<!-- generated: NAME -->` and `<!-- end -->`. `make docs` fills
the blocks from the pieces of the method, from its options and from the docstring of its module. Read
methods/composition/piece.py for the texts and experiment/settings_page.py for the page on the settings of a job.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.experiment.explain import steps_of
from shoal.methods import METHODS, Setting, available_options, build
from shoal.methods.composition.piece import piece_class
from shoal.models.model import load_model
from shoal.stages.base import DueWhenEvaluated
from shoal.store.atomic_files import write_bytes
from shoal.types import Method, Stage, StepSummary

FOLDER = Path(__file__).parents[3] / "docs" / "methods"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
DEVIATIONS_HEADING = re.compile(r"^Deviations from the \w+( study)?\n-+\n", re.MULTILINE)
NOTHING = ("", "nothing")


def page_text(name: str, text: str) -> str:
    """Returns the text of a method's page with its generated blocks filled again."""
    return BLOCK.sub(lambda match: match[1] + "\n".join(BLOCKS[match[2]](name)) + "\n" + match[3], text)


def _messages(name: str) -> Iterator[str]:
    method = _method(name)
    if not method.steps:
        yield "| stage | when |"
        yield "|---|---|"
        for stage in method.stages:
            yield _row(f"`{stage.name}`", _sentence(stage))
        return
    steps = {step: piece_class(step.step, step.piece) for step in steps_of(method) if step.step}
    yield "| step | when | a client sends | a client keeps |"
    yield "|---|---|---|---|"
    for step, piece in steps.items():
        if piece.client_sends not in NOTHING or piece.client_keeps not in NOTHING:
            texts = (text or "nothing" for text in (piece.client_sends, piece.client_keeps))
            yield _row(f"{step.step} = `{step.piece}`", _when(method, step), *texts)
    learned = [f"- {step.step}: {p.server_learns}" for step, p in steps.items() if p.server_learns not in NOTHING]
    if learned:
        yield "\nThe server learns:\n"
        yield from learned


def _method(name: str) -> Method:
    """Returns the method on a small network: what clients send does not depend on the network."""
    return build(name, Setting(load_model("mlp", (1,), 2), rounds=20, cohort_size=1, options={}))


def _when(method: Method, step: StepSummary) -> str:
    stages = {stage.name: stage for stage in method.stages}
    sentences = [_sentence(stages[name]) for name in step.stages if stages[name].schedule.clients != "none"]
    return " ".join(dict.fromkeys(sentences)) or "with another step"


def _sentence(stage: Stage) -> str:
    """Returns when clients receive a task of the stage."""
    text = str(stage.schedule)
    return text.replace("In every round", "In every evaluated round") if isinstance(stage, DueWhenEvaluated) else text


def _options(name: str) -> Iterator[str]:
    yield "| option | default | accepted values | meaning |"
    yield "|---|---|---|---|"
    for group, options in available_options(name).items():
        for key, option in options.items():
            yield _row(f"`{group}.{key}`", f"`{_as_typed(option.default)}`", option.accepted_values, option.meaning)


def _deviations(name: str) -> Iterator[str]:
    docstring = inspect.getdoc(sys.modules[METHODS[name].__module__]) or ""
    equations = [line for line in docstring.splitlines() if line.startswith("|")]
    yield from ["This table shows which code implements each part.", "", *equations, ""] if equations else []
    heading = DEVIATIONS_HEADING.search(docstring)
    yield docstring[heading.end() :].partition("\n\n")[0].strip() if heading else "None."


def _as_typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


BLOCKS: dict[str, Callable[[str], Iterator[str]]] = {
    "messages": _messages,
    "options": _options,
    "deviations": _deviations,
}


def main() -> None:
    """Fills the blocks of every page."""
    for name in METHODS:
        path = FOLDER / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        write_bytes(path, page_text(name, text).encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
