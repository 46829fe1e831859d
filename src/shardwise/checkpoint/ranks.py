"""The processes that save or load together: they tell each other facts, as JSON, and all succeed or all raise.

They talk through a Gloo group of their own, so that a save may go on in the background while the program communicates,
and facts need no device.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.files.memory import bytes_of
from shardwise.comm.new_groups import new_group
from shardwise.errors import CheckpointError, CheckpointFileError

HEAD, BRIEF = 8, 1024
"""Bytes: of a length, and of a message that is sent without asking how long it is. Most of what is said is brief."""

_T = TypeVar("_T")
_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}
atexit.register(_groups.clear)  # a group that outlives the interpreter may crash it


class Ranks:
    """`number` is this process's among `count`. The first of them does what is to be done once."""

    def __init__(self, process_group: Any = None) -> None:
        self._group: Any = None
        self.members: tuple[int, ...] = (0,)
        self.number = 0
        if dist.is_available() and dist.is_initialized():
            self.members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
            if dist.get_rank() not in self.members:
                raise CheckpointError(f"rank {dist.get_rank()} is not in the process group that it saves or loads with")
            self.number = self.members.index(dist.get_rank())
            if self.count > 1:
                self._group = _talking_group(self.members)

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def gather(self, facts: Any) -> list[Any]:
        """What each rank has to say, on all ranks."""
        mine = json.dumps(facts).encode()
        if self._group is None:
            return [json.loads(mine)]  # as others would hear it
        with _together():
            rows = self._rows(_headed(mine), BRIEF)
            sizes = [_size(row) for row in rows]
            if max(sizes) > BRIEF - HEAD:
                rows = self._rows(bytes(HEAD) + mine, HEAD + max(sizes))
        return [json.loads(_text(row, size)) for row, size in zip(rows, sizes, strict=True)]

    def _rows(self, text: bytes, room: int) -> list[Tensor]:
        rows = [_empty(room) for _ in self.members]
        dist.all_gather(rows, _padded(text, room), group=self._group)
        return rows

    def collect(self, facts: Any) -> list[Any] | None:
        """What each rank has to say, on the first: None on the others."""
        if self._group is None:
            return self.gather(facts)
        mine = json.dumps(facts).encode()
        sizes = self.gather(len(mine))
        with _together():
            room = HEAD + max(sizes)
            rows = [_empty(room) for _ in self.members] if self.is_first else None
            dist.gather(_padded(bytes(HEAD) + mine, room), rows, dst=self.members[0], group=self._group)
        if rows is None:
            return None
        return [json.loads(_text(row, size)) for row, size in zip(rows, sizes, strict=True)]

    def told(self, facts: Any) -> Any:
        """What the first rank has to say, on all ranks."""
        if self._group is None:
            return self.gather(facts)[0]
        mine = json.dumps(facts).encode() if self.is_first else b""
        with _together():
            row = _padded(_headed(mine), BRIEF)
            dist.broadcast(row, self.members[0], group=self._group)
            size = _size(row)
            if size > BRIEF - HEAD:
                row = _padded(bytes(HEAD) + mine, HEAD + size)
                dist.broadcast(row, self.members[0], group=self._group)
        return json.loads(_text(row, size))

    def agree(self, doing: str) -> None:
        """All are to do the same: where the first rank's word counts, that of another would be lost."""
        said = self.gather(doing)
        for number, other in zip(self.members, said, strict=True):
            if other != said[0]:
                raise CheckpointError(
                    f"ranks do not do the same: rank {self.members[0]} is {said[0]}, and rank {number} is {other}"
                )

    def first(self, doing: str, do: Callable[[], _T]) -> _T | None:
        """The same of the first rank alone: None on the others."""
        return self.all(doing, lambda: do() if self.is_first else None)

    def all(self, doing: str, do: Callable[[], _T]) -> _T:
        """What `do` returns, once it has on every rank. If it raises on one, all raise: there what it raised, on the
        others a CheckpointError that says where `doing` what has failed."""
        result, refused = None, None
        try:
            result = do()
        except Exception as error:
            refused = error
        said = self.gather(None if refused is None else _told(refused))
        if refused is not None:
            raise refused
        for number, other in enumerate(said):
            if other is not None:
                raise _failed_there(f"{doing} failed on rank {self.members[number]}: {other['text']}", other["errno"])
        return result  # type: ignore[return-value]


def _told(error: Exception) -> dict[str, Any]:
    return {"text": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)}


def _failed_there(what: str, errno: int | None) -> CheckpointError:
    return CheckpointError(what) if errno is None else CheckpointFileError(errno, what)


def _empty(room: int) -> Tensor:
    return torch.empty(room, dtype=torch.uint8, device="cpu")


def _headed(text: bytes) -> bytes:
    """A text behind its length."""
    return len(text).to_bytes(HEAD, "little") + text


def _padded(text: bytes, room: int) -> Tensor:
    """As much of a text as there is room for."""
    row = _empty(room).zero_()
    bytes_of(row)[: len(text)] = text[:room]
    return row


def _size(row: Tensor) -> int:
    return int.from_bytes(bytes_of(row)[:HEAD], "little")


def _text(row: Tensor, size: int) -> bytes:
    return bytes(bytes_of(row)[HEAD : HEAD + size])


@contextmanager
def _together() -> Iterator[None]:
    """Inside, the ranks talk. If one has ended, the others are told."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"the ranks that save or load together have lost one another (has one of them ended?): {error}"
        ) from error


def _talking_group(members: tuple[int, ...]) -> Any:
    """Made when it is first needed, by its members alone."""
    key = dist.group.WORLD, members
    if key not in _groups:
        for old in [old for old in _groups if old[0] is not dist.group.WORLD]:
            del _groups[old]  # of a world that was left
        if len(members) == dist.get_world_size():
            _groups[key] = dist.new_group(backend="gloo")
        else:
            _groups[key] = new_group(members, "gloo")
    return _groups[key]
