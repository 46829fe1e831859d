"""A user's own module: a Python file with ops and rules, and samples to judge them by."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.proof.kit.command import CannotRun
from shardwise.proof.verify.calls import Recorded, record


def load_module(file: str) -> Any:
    """A user's module, by its file, loaded once."""
    name = module_name(file)
    if name not in sys.modules:
        if not Path(file).is_file():
            raise CannotRun(f"--module {file}: there is no such file")
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise CannotRun(f"--module {file}: the name of a Python file ends in .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise CannotRun(f"--module {file} cannot be imported: {_line(error, spec.origin)}{_told(error)}") from error
    return sys.modules[name]


def module_name(file: str) -> str:
    """A name that no other module has: a file may be called as one of Python's own. Every process finds the same."""
    return f"_shardwise_module_{_digest(str(Path(file).resolve()).encode())}"


def source_of(file: str | None) -> str:
    """A number for what a module's file holds, if there is one: another text is other rules."""
    return _digest(Path(file).read_bytes()) if file is not None and Path(file).is_file() else ""


def user_calls(file: str) -> list[Recorded]:
    """The calls that a user's module gives as its `SAMPLES`: a dict from op to samples."""
    samples = getattr(load_module(file), "SAMPLES", {})
    if not isinstance(samples, Mapping):
        raise CannotRun(f"--module {file}: SAMPLES is a {type(samples).__name__}, not a dict {{op: [args]}}")
    found: list[Recorded] = []
    for op, given in samples.items():
        try:
            for args, kwargs in map(arguments_of, given):
                found += record(op, args, kwargs)
        except Exception as error:
            raise CannotRun(f"--module {file}: a sample of {op} cannot be called: {_told(error)}") from error
    return found


def arguments_of(sample: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a sample: a tuple of arguments, or a pair of such a tuple and a dict."""
    if not isinstance(sample, (tuple, list)):
        raise TypeError(f"a sample is a tuple of arguments, not a {type(sample).__name__}")
    if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample[0], sample[1]
    return tuple(sample), {}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a word'}"


def _line(error: Exception, file: str | None) -> str:
    """The last line of the file that an error went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {lines[-1]}: " if lines else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
