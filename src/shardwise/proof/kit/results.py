"""The results of a run, and the file that keeps them, so that a run that was stopped can go on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2]
PRESENTATION = ("cli.py", "terminal.py", "proof/kit/report.py")
"""Files that do not change any result."""


class CannotRun(Exception):
    """Why a command does not begin, in words for who asked for it."""


@dataclass
class Result:
    """What became of a task: the sum of its parts."""

    name: str

    @property
    def status(self) -> str:
        """What happened, in a word or two, if anything bad did."""
        return ""

    def add(self, part: Any) -> None:
        """Take in a part: numbers, counts and lists add up, and of the rest the first that is there stays."""
        for field in fields(self):
            mine, other = getattr(self, field.name), getattr(part, field.name)
            if isinstance(mine, dict):
                total: Any = dict(Counter(mine) + Counter(other))
            elif isinstance(mine, (int, float, list)) and not isinstance(mine, bool):
                total = mine + other
            else:
                total = mine or other
            setattr(self, field.name, total)

    def ended(self, why: str, num_parts: int) -> None:
        """Take in what ended the task early, after so many parts."""
        raise NotImplementedError


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A number for the code that results depend on."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name not in PRESENTATION:
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Store:
    """Results of some `kind`, by name, in a JSON file that is whole at any time.

    With `resume` it begins with what the file holds, if that came from the same torch, code and settings.
    """

    def __init__(
        self, file: Path | None, settings: dict[str, Any], *, resume: bool = False, kind: Callable[..., Any] = Result
    ) -> None:
        self.file, self.due = file, 0.0
        self.header = {"torch": torch.__version__, "source": source_digest(), "settings": settings}
        self.results: dict[str, Any] = {}
        if resume and file is not None and file.exists():
            try:
                known = json.loads(file.read_text())
                results = known["results"]
                if {name: known[name] for name in self.header} == self.header:
                    self.results = {name: kind(**kept) for name, kept in results.items()}
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise CannotRun(
                    f"--resume cannot go on with {file}: it does not hold the results of a run; "
                    f"leave out --resume to write over it"
                ) from error

    def add(self, result: Any) -> None:
        self.results[result.name] = result
        began = time.monotonic()
        if began >= self.due:
            self.save()
            self.due = time.monotonic() + 20 * (time.monotonic() - began)  # so that little of the time goes into it

    def save(self) -> None:
        if self.file is not None:
            content = {**self.header, "results": {name: asdict(kept) for name, kept in self.results.items()}}
            draft = self.file.with_name(f"{self.file.name}.part")
            draft.write_text(json.dumps(content, indent=1))
            os.replace(draft, self.file)
