"""Files that are installed with shoal, such as recipes. A name finds them from any folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class PackagedFiles:
    """Files of one folder of the package. A name is the path in the folder without the suffix, such as `study/own`."""

    folder: str
    suffix: str

    def files(self) -> dict[str, Path]:
        """Returns every file by its name, in alphabetical order."""
        root = PACKAGE / self.folder
        paths = {p.relative_to(root).as_posix().removesuffix(self.suffix): p for p in root.rglob(f"*{self.suffix}")}
        return dict(sorted(paths.items()))

    def find(self, name: str) -> Path | None:
        """Returns the local file of this name, with or without the suffix, or else the packaged file of this name."""
        stem = name.removesuffix(self.suffix)
        local = (p for p in (Path(name), Path(stem + self.suffix)) if p.is_file())
        return next(local, self.files().get(stem))
