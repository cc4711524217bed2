"""Writes experiment/settings.py and docs/settings.md from the declared settings of a job.

`make docs` runs this module.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from shoal.experiment.declaration import PANELS, Declaration
from shoal.experiment.job import SETTINGS
from shoal.store.atomic_files import write_bytes

TYPES_FILE = Path(__file__).with_name("settings.py")
PAGE_FILE = Path(__file__).parents[3] / "docs" / "settings.md"
WIDTH = 120

_TYPES_BEGIN = '''"""The settings that `shoal.run` takes, as types.

`make docs` writes this file from experiment/job.py.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class JobSettings(TypedDict, total=False):
    """Keyword arguments of `shoal.run`."""
'''

_PAGE_BEGIN = """# Settings

These are the settings of a job.

- On the command line, `shoal run`, `compare`, `profile` and `explain` take them as flags. `shoal data show` takes the
  flags that concern the data.
- In a [recipe](recipes.md), they are keys.
- In Python, [`shoal.run`](python.md) takes them as keyword arguments. Those of the data are arguments of `shoal.load`
  and `shoal.partition` instead.

Options of a method's pieces are given with `set`. [Methods](methods.md#options) lists them.

This page follows from `src/shoal/experiment/job.py`. Do not edit it by hand: [`make docs` writes it](contributing.md).
"""


def types_source() -> str:
    """Returns the source of `JobSettings`."""
    lines = [_TYPES_BEGIN.rstrip("\n")]
    for setting in SETTINGS.values():
        if setting.scope == "run" and setting.name != "method":
            lines += ["", f"    {setting.name}: {_type_source(setting)}", *_docstring(setting)]
    return "\n".join(lines) + "\n"


def _type_source(setting: Declaration) -> str:
    kind = setting.annotation
    source = kind.__name__ if kind in (bool, int, float, str) else str(kind)
    return source.replace("typing.", "").replace("'", '"')


def _docstring(setting: Declaration) -> list[str]:
    text = f'"""{setting.help_text} Default: {_default(setting)}."""'
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _default(setting: Declaration) -> str:
    return setting.unset_meaning or json.dumps(setting.default)


def page_text() -> str:
    """Returns the text of docs/settings.md."""
    return _PAGE_BEGIN + "".join(f"\n## {panel}\n\n" + "\n".join(_table(panel)) + "\n" for panel in PANELS)


def _table(panel: str) -> Iterator[str]:
    yield "| name | flag | type | default | range | meaning |"
    yield "|---|---|---|---|---|---|"
    for setting in SETTINGS.values():
        if setting.panel == panel:
            flag = f"`{setting.flag}`" if setting.flag else "none"
            default = setting.unset_meaning or f"`{json.dumps(setting.default)}`"
            cells = f"`{setting.name}`", flag, setting.type_words, default, setting.bounds, setting.description
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def main() -> None:
    """Writes both files."""
    for path, text in ((TYPES_FILE, types_source()), (PAGE_FILE, page_text())):
        write_bytes(path, text.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
