"""The safetensors format: what a file says it holds, checked before anything else of it is read; and how to say it.

A file is the length of its header in eight bytes, the header, which is JSON, and the data. The header says for every
key dtype, shape, and where its bytes are, counted from the end of the header. The bytes of all keys are the whole rest
of the file, one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.files.reader import Reader
from shardwise.checkpoint.files.reading import are_sizes, is_possible
from shardwise.errors import CheckpointError, DamagedFileError

LONGEST_HEADER = 100_000_000
"""The format's own limit."""

METADATA = "__metadata__"
"""A key that is no tensor's: under it a file has text."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    "C64": torch.complex64,
}
"""What the format calls torch's dtypes."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Dtypes of the format that are no dtypes of single elements in torch."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `begin` is where its bytes begin, counted from the beginning of the file."""

    path: Path
    key: str
    code: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None where torch has no dtype for single elements of it."""
        return DTYPES.get(self.code)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says it holds."""

    path: Path
    size: int
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The header of a file, which must account for every byte of it."""
    with Reader(path) as file:
        if file.size < 8:
            raise DamagedFileError(f"a safetensors file has at least 8 bytes, this one {file.size}", path)
        length = int.from_bytes(file.read(0, 8), "little")
        if length > min(LONGEST_HEADER, file.size - 8):
            raise DamagedFileError(
                f"the header is said to have {length} bytes, and the file has {file.size}; it was cut off, or is no "
                f"safetensors file",
                path,
                offset=0,
            )
        said = parsed(file.read(8, length), path, offset=8)
        metadata = _metadata(said.pop(METADATA, {}), path)
        begin = 8 + length
        tensors = {key: _stored(key, entry, begin, path) for key, entry in said.items()}
        _check_covered(list(tensors.values()), begin, file.size, path)
        return Header(path, file.size, tensors, metadata)


def parsed(text: bytes, path: object, *, offset: int = 0) -> dict[str, Any]:
    """A JSON object, in which no key comes twice."""
    try:
        said = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # of text that is no JSON, or nested without end
        raise DamagedFileError(f"this is not valid JSON: {error}", path, offset=offset) from error
    if not isinstance(said, dict):
        raise DamagedFileError(f"expected a JSON object, found a {type(said).__name__}", path, offset=offset)
    return said


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _metadata(said: Any, path: Path) -> dict[str, str]:
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise DamagedFileError(f"{METADATA} is not a mapping from text to text", path, key=METADATA, offset=8)
    return said


def _stored(key: str, entry: Any, begin: int, path: Path) -> Stored:
    """One entry of the header, unless it contradicts itself."""

    def wrong(what: str, offset: int = 8) -> DamagedFileError:
        return DamagedFileError(what, path, key=key, offset=offset)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("an entry of the header has a dtype, a shape and data_offsets, and nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or (code not in DTYPES and code not in _PACKED_BITS):
        raise wrong(f"unknown dtype {code!r}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"shape {shape!r} and data_offsets {offsets!r} are not sizes")
    if not is_possible(shape):
        raise wrong(f"no tensor has the shape {shape if len(shape) < 9 else f'of {len(shape)} dims'}")
    num_bits = math.prod(shape) * (_PACKED_BITS[code] if code in _PACKED_BITS else DTYPES[code].itemsize * 8)
    if num_bits != (offsets[1] - offsets[0]) * 8:
        raise wrong(
            f"{code} of shape {shape} takes {-(-num_bits // 8)} bytes, not {offsets[1] - offsets[0]}",
            begin + offsets[0],
        )
    return Stored(path, key, code, tuple(shape), begin + offsets[0], offsets[1] - offsets[0])


def _check_covered(tensors: Sequence[Stored], begin: int, size: int, path: Path) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    at = begin
    for stored in sorted(tensors, key=lambda stored: (stored.begin, stored.num_bytes)):
        if stored.begin != at:
            what = (
                "begins before the one in front of it ends" if stored.begin < at else "leaves bytes that are nobody's"
            )
            raise DamagedFileError(f"the tensor {what}", path, key=stored.key, offset=min(stored.begin, at))
        at += stored.num_bytes
        if at > size:
            raise DamagedFileError(
                f"the file ends at byte {size}, before byte {at} where the tensor does: it was cut off",
                path,
                key=stored.key,
                offset=stored.begin,
            )
    if at != size:
        raise DamagedFileError(f"the file goes on to byte {size} with bytes that are nobody's", path, offset=at)


# Writing


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor that is to be in a file."""

    key: str
    code: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.code].itemsize


def check_key(key: str) -> None:
    """The format has no tensor that is called as its metadata are, and no halves of letters."""
    if key == METADATA or any("\ud800" <= letter <= "\udfff" for letter in key):
        raise CheckpointError(f"{key!r} can be no key of a safetensors file; give it another name")


def in_file_order(tensors: Sequence[Written]) -> list[Written]:
    """Wide elements first, so that all are aligned: readers that map a file need it."""
    return sorted(tensors, key=lambda tensor: -DTYPES[tensor.code].itemsize)


def make_header(tensors: Sequence[Written], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds tensors in this order, with the length of the header; data are aligned."""
    said: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        said[tensor.key] = {
            "dtype": tensor.code,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
