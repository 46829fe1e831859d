"""`load`: a model's parameters from safetensors files, each rank reading what its shards need."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint.background import wait
from shardwise.checkpoint.entries import (
    Entry,
    check_kept,
    replace,
    state_of,
    was_written,
    with_memory,
    without_memory,
)
from shardwise.checkpoint.files.file_sets import FileSet, find_files
from shardwise.checkpoint.files.memory import held_shards
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.verifying import claims_of, verify
from shardwise.checkpoint.models.sources import KeyMap, resolved
from shardwise.checkpoint.models.stored_views import Source, fill, sources_of
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError
from shardwise.layout.layout import Box
from shardwise.tensor import DTensor
from shardwise.words import some


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a load: names of the model that no file has, keys of files that no rank's model has, and how many
    bytes this process has read."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    num_bytes: int


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    keys: KeyMap | None = None,
    strict: bool = True,
    verify: bool = False,
    process_group: Any = None,
) -> Loaded:
    """Load a model's parameters and persistent buffers from a safetensors file, or a set of them with an index.

    `path` is a file, an index or a folder. Each rank reads the bytes that its shards need and no others, straight into
    the shards; what is on the meta device gets memory. `keys` says what is read from elsewhere than its own name. All
    is checked before anything is written: names (unless `strict` is False), shapes, dtypes, headers, sizes of files; if
    anything is wrong, all ranks raise, and the model is as it was. The data themselves are compared with checksums, by
    reading them once more, if `verify` says so and `save` has written the file. All ranks of the process group call it.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> model = sw.distribute_module(torch.nn.Linear(4, 2), mesh)
    >>> sw.checkpoint.save(model, "linear")
    >>> sw.checkpoint.load(torch.nn.Linear(4, 2), "linear").missing_keys
    ()
    """
    return load_with(
        model, path, keys=keys, ranks=Ranks(process_group), strict=Strictness() if strict else None, verify=verify
    )


@dataclass(frozen=True, slots=True)
class Strictness:
    """Names must be there, and keys of use, but for those in which one of these is found."""

    may_be_missing: Sequence[re.Pattern[str]] = ()
    may_be_left_over: Sequence[re.Pattern[str]] = ()

    def check(self, model: nn.Module, missing: Sequence[str], unexpected: Sequence[str], path: object) -> None:
        missing = [name for name in missing if not any(pattern.search(name) for pattern in self.may_be_missing)]
        unexpected = [key for key in unexpected if not any(pattern.search(key) for pattern in self.may_be_left_over)]
        wrong = []
        if missing:
            wrong.append(f"no file has {some(map(repr, missing))}")
        if unexpected:
            wrong.append(f"the model has nothing for {some(map(repr, unexpected))}")
        if wrong:
            raise CheckpointError(
                f"{path} does not fit {type(model).__name__}: {'; '.join(wrong)}. If they have other names there, say "
                f"so with keys=; to load what fits, strict=False"
            )


def load_with(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    keys: KeyMap | None,
    ranks: Ranks,
    strict: Strictness | None,
    verify: bool,
) -> Loaded:
    wait()  # it talks through the same group
    doing = f"loading {path}"
    plan = ranks.all(doing, lambda: _Plan.of(model, path, keys))
    unexpected = ranks.all(doing, lambda: _unexpected(plan, ranks))
    ranks.all(doing, lambda: strict.check(model, plan.missing, unexpected, path) if strict is not None else None)
    num_bytes = ranks.all(f"verifying {path}", lambda: plan.verify(ranks) if verify else 0)
    with says_what_was_changed(model):
        num_bytes += ranks.all(doing, plan.read)
    plan.show()
    return Loaded(tuple(plan.missing), tuple(unexpected), num_bytes)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the model, with memory, and what is read into it."""

    entry: Entry
    target: Tensor
    sources: Sequence[Source]


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is read for a model, and what is not there."""

    model: nn.Module
    files: FileSet
    wanted: Sequence[_Wanted]
    missing: Sequence[str]
    used: frozenset[str]

    @staticmethod
    def of(model: nn.Module, path: str | os.PathLike[str], keys: KeyMap | None) -> _Plan:
        files = find_files(path)
        entries, _ = state_of(model)
        check_kept(model, entries)
        origin = resolved([name for entry in entries for name in entry.names], keys)
        wanted, missing, wrong = [], [], []
        used: set[str] = set()
        for entry in entries:
            sources = [source for name in entry.names if (source := origin[name]) is not None]
            there = [source for source in sources if all(key in files.keys for key in source.keys)]
            used.update(key for source in there for key in source.keys)
            if not sources:
                continue
            if not there:
                missing.append(entry.name)
                continue
            try:  # of a tied tensor's names the last one counts, as in torch
                found = [files.keys[key] for key in there[-1].keys]
                made = sources_of(there[-1], found, tuple(entry.tensor.shape), entry.tensor.dtype)
                wanted.append(_Wanted(entry, _target(entry.tensor), made))
            except CheckpointError as error:
                wrong.append(f"{entry.name!r} {error}")
        if wrong:
            raise CheckpointError(f"{path} does not fit {type(model).__name__}: {some(wrong)}")
        _check_filled(model, wanted, path)
        return _Plan(model, files, wanted, missing, frozenset(used))

    def verify(self, ranks: Ranks) -> int:
        return verify(claims_of(self.files), number=ranks.number, count=ranks.count)

    def read(self) -> int:
        with Opened() as files:
            for wanted in self.wanted:
                fill_tensor(wanted.target, wanted.sources, files)
            return files.num_read

    def show(self) -> None:
        """Have the model hold what was read."""
        was_written(wanted.target for wanted in self.wanted)
        replace(self.model, [(wanted.entry.tensor, wanted.target) for wanted in self.wanted])


def _target(x: Tensor) -> Tensor:
    """What is read into: with memory, and nothing pending."""
    if isinstance(x, DTensor):
        if x._layout.mesh.device_type == "meta":
            raise CheckpointError(f"is on {x._layout.mesh}, which holds no data")
        if x._layout.has_pending:
            raise CheckpointError(f"is {x._layout}: reduce what is pending on it first, with redistribute")
    return with_memory(x)


@contextmanager
def says_what_was_changed(*modules: nn.Module) -> Iterator[None]:
    """If reading fails inside, after everything was checked, say so."""
    try:
        yield
    except Exception as error:
        names = " and ".join(type(module).__name__ for module in modules)
        error.add_note(f"All was well when it was checked. What was read until now is in {names}, and the rest is not.")
        raise


def fill_tensor(target: Tensor, sources: Sequence[Source], files: Opened) -> None:
    """Read the shards held here. Replicas of one another are read once."""
    done: dict[Box, Tensor] = {}
    for box, shard in held_shards(target):
        if box in done:
            shard.copy_(done[box])
        else:
            fill(sources, box, shard, files)
            done[box] = shard


def _check_filled(model: nn.Module, wanted: Sequence[_Wanted], path: object) -> None:
    """What has no memory and is not in a state dict, a table that a constructor computes, say, would stay without."""
    filled = {name for one in wanted for name in one.entry.names}
    saved = {name for entry in state_of(model)[0] for name in entry.names}
    empty = [name for name in without_memory(model) if name not in filled and name not in saved]
    if empty:
        raise CheckpointError(
            f"{type(model).__name__} has buffers on the meta device that no file has, because they are not persistent: "
            f"{some(map(repr, empty))}. Make the model with shardwise.init_on, or give them their values first"
        )


def _unexpected(plan: _Plan, ranks: Ranks) -> list[str]:
    """The keys that no rank has a use for. Ranks may have different parts of a model."""
    keys = sorted(plan.files.keys)
    said = ranks.gather("".join("01"[key in plan.used] for key in keys))
    if len({len(used) for used in said}) > 1:
        raise CheckpointError(f"ranks find different files at {plan.files.path}: with {sorted(map(len, said))} keys")
    return [key for at, key in enumerate(keys) if all(used[at] == "0" for used in said)]
