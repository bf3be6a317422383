"""What the sources of files share: which files they read, and how a saved position names one of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ResumeError
from penstock.files.listing import PathLike, list_files
from penstock.pipeline.stages import State

__all__ = ["FileList"]


class FileList:
    """The files behind a path, directory, glob or list of them; looked for when first needed."""

    def __init__(self, paths: PathLike | Iterable[PathLike], suffixes: tuple[str, ...]) -> None:
        single = isinstance(paths, str) or hasattr(paths, "__fspath__")
        self._paths: list[PathLike] = [paths] if single else list(paths)  # type: ignore[arg-type, list-item]
        self._suffixes = suffixes
        self._found: list[Path] | None = None

    @property
    def files(self) -> list[Path]:
        if self._found is None:
            self._found = list_files(self._paths, self._suffixes)
        return self._found

    def name(self, number: int) -> str | None:
        """The name of a file without its directory, which may be another one after a move; None behind the last."""
        return self.files[number].name if number < len(self.files) else None

    def state(self, number: int) -> State:
        """What a position in a file has to say about the file."""
        return {"files": len(self.files), "file": number, "path": self.name(number)}

    def check(self, state: State) -> None:
        """Refuse a position in files that are not these."""
        number, count = state["file"], len(self.files)
        if state["files"] != count:
            raise ResumeError(
                f"the state was saved with {state['files']} input files, now there are {count}; "
                "restore the same files, or start without the state"
            )
        if self.name(number) != state["path"]:
            raise ResumeError(
                f"file {number + 1} of the input was {state['path']!r} when the state was saved and is "
                f"{self.name(number)!r} now; restore the same files, or start without the state"
            )

    def __str__(self) -> str:
        if len(self._paths) > 2:
            return f"{len(self._paths)} paths"
        return ", ".join(repr(str(path)) for path in self._paths)
