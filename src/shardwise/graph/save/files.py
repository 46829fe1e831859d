"""The files of saved programs: one of JSON for each process, beside it one of tensors in safetensors' format."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.files.memory import bytes_of, in_rows
from shardwise.checkpoint.files.safetensors import CODES, Written, make_header, read_header
from shardwise.errors import SavedProgramError

FORMAT, VERSION = "shardwise program", 1


def versions() -> dict[str, str]:
    """What a program may depend on: torch's ops, this package, and how Python compiles functions."""
    package = sys.modules[__name__.partition(".")[0]]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"torch": torch.__version__.split("+")[0], "shardwise": package.__version__, "python": python}


def _stem(folder: Path) -> Path:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return folder / f"rank-{rank:05}"


def write(folder: Path, programs: list[dict[str, Any]], constants: Sequence[Tensor]) -> None:
    """Write what this process has. A file is there as a whole, or as it was before; the one of JSON comes last."""
    stem = _stem(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _packed(constants)
    _replace(stem.with_suffix(".safetensors"), tensors)
    content = {
        **{"format": FORMAT, "version": VERSION, "versions": versions()},
        **{"programs": programs, "tensors": hashlib.sha256(tensors).hexdigest()},
    }
    text = _text(content)
    _replace(stem.with_suffix(".json"), f'{{"digest": "{_digest(text)}", "content": {text}}}'.encode())


def read(folder: Path) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """What was written for this process: programs and constants."""
    stem = _stem(folder)
    file, beside = stem.with_suffix(".json"), stem.with_suffix(".safetensors")
    try:
        data, tensors = file.read_bytes(), beside.read_bytes()
    except OSError as error:
        raise _not_there(folder, error) from None
    content = _content(data, tensors)
    if content is None:
        raise SavedProgramError(
            f"{file} is not as it was written: it, or the file beside it, has changed or is damaged"
        )
    if content["version"] != VERSION:
        raise SavedProgramError(f"{file} is of format {content['version']}; this version reads format {VERSION}")
    for name, here in versions().items():
        if (saved := content["versions"].get(name)) != here:
            raise SavedProgramError(f"{file} was saved with {name} {saved}; this is {name} {here}: capture it again")
    return content["programs"], _unpacked(beside, tensors)


def _not_there(folder: Path, error: OSError) -> SavedProgramError:
    if not isinstance(error, FileNotFoundError):
        return SavedProgramError(f"{error.filename} cannot be read: {error.strerror}")
    there = sorted(path.name for path in folder.glob("rank-*.json")) if folder.is_dir() else []
    found = f"{folder} has {', '.join(there)}" if there else f"there are no saved programs in {folder}"
    return SavedProgramError(f"{error.filename} is missing: {found}")


def _content(data: bytes, tensors: bytes) -> dict[str, Any] | None:
    """What a file says; None if that is not what was written, with these tensors."""
    try:
        whole = json.loads(data)
        content: dict[str, Any] = whole["content"]
        is_whole = whole["digest"] == _digest(_text(content)) and content["format"] == FORMAT
        is_whole = is_whole and content["tensors"] == hashlib.sha256(tensors).hexdigest()
        kinds = [type(content[name]) for name in ("version", "versions", "programs")]
        return content if is_whole and kinds == [int, dict, list] else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(file: Path, data: bytes) -> None:
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(data)
    os.replace(new, file)


# Tensors


def _packed(tensors: Sequence[Tensor]) -> bytes:
    """Tensors in safetensors' format, by their numbers."""
    if unknown := [x.dtype for x in tensors if x.dtype not in CODES]:
        raise SavedProgramError(f"a constant of {unknown[0]} cannot be saved")
    entries = [Written(str(number), CODES[x.dtype], tuple(x.shape)) for number, x in enumerate(tensors)]
    rows = [in_rows(x).cpu() for x in tensors]
    return make_header(entries, {}) + b"".join(map(bytes_of, rows))


def _unpacked(path: Path, data: bytes) -> list[Tensor]:
    stored = read_header(path).tensors
    found = []
    for own in (stored[str(number)] for number in range(len(stored))):
        found.append(torch.empty(own.shape, dtype=own.dtype))
        bytes_of(found[-1])[:] = data[own.begin : own.begin + own.num_bytes]
    return found
