"""The results of a run, and the file that keeps them, so that a run that was stopped can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2]
PRESENTATION = ("cli.py", "proof/kit/progress.py", "proof/kit/report.py")
"""Files that do not change any result."""


class NotResults(Exception):
    """Why a run cannot go on with a file."""


@dataclass
class Result:
    """What became of the calls of one operator."""

    name: str
    dtype: str = ""
    note: str = ""  # why it was not tried
    samples: int = 0
    refused_by_torch: int = 0
    random: int = 0  # samples whose values cannot be compared
    counts: dict[str, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)  # right calls, by how they are written
    gradients: dict[str, int] = field(default_factory=dict)  # right calls, by whether gradients were compared
    rounding: dict[str, int] = field(default_factory=dict)  # right calls that are off by rounding
    avoidable: int = 0
    strides: dict[str, Any] = field(default_factory=dict)  # right calls whose results lie otherwise: count, the first
    problems: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def valueless(self) -> bool:
        """Whether no sample has a value to compare."""
        return 0 < self.samples == self.random

    @property
    def status(self) -> str:
        """The worst that happened, if anything bad did."""
        return self.problems[0]["kind"] if self.problems else ""

    @property
    def calls(self) -> int:
        return sum(self.counts.values())


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
    """Results by operator, of some `kind` of dataclass with a name, in a JSON file that is whole at any time.

    With `resume` it begins with what the file holds, if that came from the same torch, code and settings.
    """

    def __init__(
        self, file: Path | None, settings: dict[str, Any], *, resume: bool = False, kind: Callable[..., Any] = Result
    ) -> None:
        self.file = file
        self.header = {"torch": torch.__version__, "source": source_digest(), "settings": settings}
        self.results: dict[str, Any] = {}
        if resume and file is not None and file.exists():
            try:
                self.results = self._kept(json.loads(file.read_text()), kind)
            except OSError as error:
                raise NotResults(f"--resume cannot go on with {file}: {error.strerror}") from error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise NotResults(
                    f"--resume cannot go on with {file}: it does not hold the results of a run; "
                    f"leave out --resume to write over it"
                ) from error

    def _kept(self, known: Any, kind: Callable[..., Any]) -> dict[str, Any]:
        """What a file holds of the same torch, code and settings."""
        results = known["results"]
        if {name: known[name] for name in self.header} != self.header:
            return {}
        return {name: kind(**kept) for name, kept in results.items()}

    def add(self, result: Any) -> None:
        self.results[result.name] = result
        if self.file is None:
            return
        content = {**self.header, "results": {name: asdict(kept) for name, kept in self.results.items()}}
        draft = self.file.with_name(f"{self.file.name}.part")
        draft.write_text(json.dumps(content, indent=1))
        os.replace(draft, self.file)
