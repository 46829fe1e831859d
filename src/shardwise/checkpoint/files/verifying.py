"""Files compared with the checksums that they carry, each rank doing its share, before anything is loaded."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files.checksums import CHECKSUMS, Summed, check, from_text, seed
from shardwise.checkpoint.files.file_sets import FileSet
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.reading import Region, contiguous_region
from shardwise.checkpoint.files.safetensors import DTYPES, METADATA, Header, Stored
from shardwise.checkpoint.pieces import flaw
from shardwise.errors import CheckpointError, DamagedFileError
from shardwise.layout import Box


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes of a file, and what their checksum was when they were written; it begins with a number."""

    path: Path
    key: str
    region: Region
    checksum: int
    begin: int = 0


def claims_of(files: FileSet) -> list[Claim]:
    """What a model's files say of their own data."""
    return [claim for header in files.files for claim in _claims_of(header)]


def _claims_of(header: Header) -> list[Claim]:
    text = header.metadata.get(CHECKSUMS)
    if text is None:
        raise CheckpointError(
            f"{header.path} carries no checksums to be verified by: only files that shardwise.checkpoint.save wrote do"
        )
    try:
        sums = from_text(text)
    except ValueError as error:
        raise DamagedFileError(str(error), header.path, key=METADATA, offset=8) from error
    return [claim for stored in header.tensors.values() for claim in _of_tensor(stored, sums.get(stored.key, ()))]


def _of_tensor(stored: Stored, sums: Sequence[Summed]) -> list[Claim]:
    if not are_whole(stored.shape, [one.box for one in sums]):
        raise DamagedFileError("its checksums are not of all its data", stored.path, key=stored.key, offset=8)
    region = contiguous_region(stored.begin, stored.shape, DTYPES[stored.code])
    begin = seed(stored.key, stored.code, stored.shape)
    return [Claim(stored.path, stored.key, region.box(*one.box), one.checksum, begin) for one in sums]


def are_whole(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes that a file tells of are the whole tensor, each element once."""
    return all(len(starts) == len(sizes) == len(shape) for starts, sizes in boxes) and flaw(shape, boxes) is None


def verify(claims: Sequence[Claim], *, number: int = 0, count: int = 1) -> int:
    """Read this rank's share of what is claimed, of `count` ranks together, and raise at the first that is not so. What
    is returned are the bytes read."""
    with Opened() as files:
        for claim in _share(claims, number, count):
            check(files[claim.path], claim.region, claim.checksum, key=claim.key, begin=claim.begin)
        return files.num_read


def _share(claims: Iterable[Claim], number: int, count: int) -> list[Claim]:
    """So that all ranks have about as much to read."""
    load, mine = [(0, rank) for rank in range(count)], []
    for claim in sorted(claims, key=lambda claim: -claim.region.num_bytes):  # stable: alike on all ranks
        num_bytes, rank = load[0]
        heapq.heapreplace(load, (num_bytes + claim.region.num_bytes, rank))
        if rank == number:
            mine.append(claim)
    return sorted(mine, key=lambda claim: (claim.path, claim.region.begin))
