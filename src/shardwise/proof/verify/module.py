"""A user's own module: a Python file with ops and rules, and samples to judge them by."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.proof.kit.results import CannotRun
from shardwise.proof.verify.calls import record
from shardwise.proof.verify.case import Case


@lru_cache
def load_module(file: str) -> dict[str, Any]:
    """What a user's module defines, by its file; it is run once."""
    try:
        return runpy.run_path(file)
    except Exception as error:
        raise CannotRun(f"--module {file} cannot be imported: {_line(error)}") from error


def source_of(file: str | None) -> str:
    """A number for what a module's file holds, if there is one: another text is other rules."""
    there = file is not None and Path(file).is_file()
    return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()[:16] if there else ""


def user_calls(file: str) -> list[Case]:
    """The calls that a user's module gives as its `SAMPLES`: a dict from op to samples."""
    samples = load_module(file).get("SAMPLES", {})
    if not isinstance(samples, Mapping):
        raise CannotRun(f"--module {file}: SAMPLES is a {type(samples).__name__}, not a dict {{op: [args]}}")
    found: list[Case] = []
    for op, given in samples.items():
        try:
            for args, kwargs in map(arguments_of, given):
                found += record(op, args, kwargs)
        except Exception as error:
            raise CannotRun(f"--module {file}: a sample of {op} cannot be called: {_line(error)}") from error
    return found


def arguments_of(sample: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a sample: a tuple of arguments, or a pair of such a tuple and a dict."""
    if not isinstance(sample, (tuple, list)):
        raise TypeError(f"a sample is a tuple of arguments, not a {type(sample).__name__}")
    if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample[0], sample[1]
    return tuple(sample), {}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a word'}"
