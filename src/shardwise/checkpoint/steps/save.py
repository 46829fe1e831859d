"""`save_step`: all that training needs to go on, in a folder that is there complete or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import background as in_background
from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.files.file_sets import SUFFIX
from shardwise.checkpoint.files.folders import appear, beside, make_folder, remove, remove_unfinished
from shardwise.checkpoint.files.memory import bytes_of, in_rows, layout_of
from shardwise.checkpoint.files.reading import contiguous_region
from shardwise.checkpoint.files.safetensors import CODES, Written, check_key, in_file_order, make_header
from shardwise.checkpoint.files.writing import make_file, open_to_write, write_file
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.steps.folders import new_folder, superseded
from shardwise.checkpoint.steps.index import (
    INDEX,
    SavedBox,
    SavedLayout,
    SavedTensor,
    StepIndex,
    index_text,
    layout_from,
    layout_said,
)
from shardwise.checkpoint.steps.random_states import States, all_states, random_states
from shardwise.checkpoint.steps.training_state import check_kinds, encoded
from shardwise.checkpoint.steps.trees import numbered
from shardwise.checkpoint.writers import Part, Whole, check_has_data, parts_of, put_together
from shardwise.dispatch.interop.state_dicts import settled
from shardwise.errors import CheckpointError, CheckpointFileError, CheckpointWarning
from shardwise.words import dtype_named


def save_step(
    directory: str | os.PathLike[str],
    *,
    step: int,
    keep: int | None = None,
    background: bool = True,
    process_group: Any = None,
    **state: Any,
) -> Saving:
    """Save a step of training, so that `load_latest` can go on from it, on any mesh.

    `state` is what makes up the program, by names of your choice: modules, optimizers, whatever has a `state_dict`
    (schedulers, data loaders …), generators, and dicts of numbers, text and tensors. The states of random numbers are
    saved as well. Each step is a folder of its own, which appears when all ranks have written their part; if one could
    not, all raise, and what was there is as it was. With `keep`, steps before the last so many are then removed.

    In the background, what this rank writes is copied to the host first; then it is written while the program goes on.
    One step at a time: the next one waits for it, and raises what went wrong, as `wait` does. All ranks of the process
    group call this, and see the same file system.

    >>> import torch, shardwise as sw
    >>> model = sw.fully_shard(torch.nn.Linear(4, 2), mesh=sw.simulate((2,), ("dp",)))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> saving = sw.checkpoint.save_step("run", step=10, model=model, optimizer=optimizer, data={"position": 640})
    >>> saving.wait().name
    'step-00000010'
    """
    in_background.wait()
    ranks = Ranks(process_group)
    doing = f"saving step {step} in {directory}"
    ranks.agree(f"{doing}, with keep={keep}")
    ranks.all(doing, lambda: _check(step, keep, state))
    said, found, loose = ranks.all(doing, lambda: _encoded(state))
    _check_same({key: found[key] for key in loose}, ranks)
    tensors = {key: settled(x) for key, x in found.items()}
    parts, facts = parts_of(tensors, ranks)
    parts = ranks.all(doing, lambda: [part.copied() for part in parts] if background else parts)
    layouts = {key: SavedLayout.of(layout) for key, x in tensors.items() if (layout := layout_of(x)) is not None}
    facts |= {"layouts": {key: layout_said(layout) for key, layout in layouts.items()}, "random": random_states()}
    content = _Content(Path(directory).absolute(), step, keep, parts, facts, said)
    return in_background.started(lambda: _save(content, ranks, doing), background=background)


def _check(step: int, keep: int | None, state: Mapping[str, Any]) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise TypeError(f"step is the number of a step, counted from 0: not {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise TypeError(f"keep is how many steps are kept, at least 1, or None for all: not {keep!r}")
    check_kinds(state)


def _encoded(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    said, tensors, loose = encoded(state)
    for key, x in tensors.items():
        check_key(key)
        check_has_data(key, x)
    return said, tensors, loose


SAMPLE = 2**12
"""As many numbers of a tensor are compared between ranks."""


def _check_same(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """One rank's is saved: if those of others are not alike, what is theirs would be lost. A sample shows it."""
    said = ranks.gather({key: _sampled(x) for key, x in tensors.items()})
    for key, sample in {key: sample for one in said for key, sample in one.items()}.items():
        if any(one.get(key, sample) != sample for one in said):
            raise CheckpointError(
                f"{key!r} is not the same on all ranks, and one of them would be saved for all. Give what belongs to a "
                f"rank a name of its own, or save a DTensor"
            )


def _sampled(x: Tensor) -> int:
    flat = x.detach().reshape(-1)
    sample = in_rows(flat[:: flat.numel() // SAMPLE + 1]).cpu()
    return zlib.crc32(bytes_of(sample))


@dataclass(frozen=True, slots=True)
class _Content:
    """What is to be written of a step: this rank's parts of tensors, what to tell others of them, and the rest."""

    directory: Path
    step: int
    keep: int | None
    parts: Sequence[Part]
    facts: Mapping[str, Any]
    state: Mapping[str, Any]


def _save(content: _Content, ranks: Ranks, doing: str) -> Path:
    """Nothing is visible before the first rank, which knows that all have written, renames the folder."""
    unfinished = Path(ranks.told(ranks.first(doing, lambda: str(_begin(content)))))
    try:
        own = ranks.all(doing, lambda: _write_parts(content.parts, unfinished, f"rank-{ranks.number:05}{SUFFIX}"))
        said = ranks.collect({**content.facts, **own})
        state = _state_of_all(content.state, ranks)
        path = ranks.first(doing, lambda: str(_complete(content, said or [], state, unfinished)))
    except BaseException:
        if ranks.is_first:
            with suppress(CheckpointFileError):  # what went wrong first is what counts
                remove(unfinished)
        raise
    return Path(ranks.told(path))


def _begin(content: _Content) -> Path:
    make_folder(content.directory)
    remove_unfinished(content.directory)
    unfinished = beside(new_folder(content.directory, content.step))
    make_folder(unfinished)
    return unfinished


def _write_parts(parts: Sequence[Part], unfinished: Path, name: str) -> dict[str, Any]:
    """This rank's file. What is returned says where in it the parts lie, in their order, and their checksums."""
    if not parts:
        return {"file": name, "size": None, "offsets": [], "sums": []}
    entries = _entries(parts)
    order = in_file_order(entries)
    header = make_header(order, {"format": "pt"})
    offsets, size = {}, len(header)
    for entry in order:
        offsets[entry.key] = size
        size += entry.num_bytes
    make_file(unfinished / name, size)
    with open_to_write(unfinished / name) as file:
        file.write(header, 0)
        places = [offsets[entry.key] for entry in entries]
        sums = [
            file.write_tensor(contiguous_region(at, part.data.shape, part.data.dtype), part.data)
            for at, part in zip(places, parts, strict=True)
        ]
    return {"file": name, "size": size, "offsets": places, "sums": sums}


def _entries(parts: Sequence[Part]) -> list[Written]:
    """One for each part. A tensor may be called as a part of another is."""
    found: dict[str, Written] = {}
    for part in parts:
        entry = _entry(part)
        name = next(name for name in numbered(entry.key) if name not in found)
        found[name] = replace(entry, key=name)
    return list(found.values())


def _entry(part: Part) -> Written:
    """A part as a tensor of its own. What the format has no dtype for are bytes there."""
    starts, sizes = part.box
    is_whole = sizes == part.shape
    where = ",".join(f"{start}:{start + size}" for start, size in zip(starts, sizes, strict=True))
    code = CODES.get(part.data.dtype)
    shape = sizes if code else (*sizes, part.data.dtype.itemsize)
    return Written(part.key if is_whole else f"{part.key}[{where}]", code or "U8", shape)


def _state_of_all(state: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What is the same on all ranks, once; of the rest what each has."""
    said = ranks.gather({name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in state.items()})
    names = list(dict.fromkeys(name for one in said for name in one))
    apart = [name for name in names if any(one.get(name) != said[0].get(name) for one in said)]
    own = ranks.collect({name: state.get(name) for name in apart}) or []
    return {name: {"ranks": [one[name] for one in own]} if name in apart else {"all": state[name]} for name in names}


def _complete(content: _Content, said: Sequence[Any], state: Mapping[str, Any], unfinished: Path) -> Path:
    """The index, then the name; then what is no longer needed goes."""
    states: list[States] = [facts["random"] for facts in said]
    index = StepIndex(
        unfinished,
        content.step,
        len(said),
        {facts["file"]: facts["size"] for facts in said if facts["size"] is not None},
        {whole.key: _saved(whole, said) for whole in put_together(said)},
        state,
        all_states(states),
        {"torch": torch.__version__, "time": datetime.now(UTC).isoformat(timespec="seconds")},
    )
    write_file(unfinished / INDEX, index_text(index))
    path = new_folder(content.directory, content.step)
    appear(unfinished, path)
    try:
        for old in superseded(path, content.keep):
            remove(old)
    except CheckpointFileError as error:
        warnings.warn(f"{path} is saved, but an older step is still there: {error}", CheckpointWarning, stacklevel=2)
    return path


def _saved(whole: Whole, said: Sequence[Any]) -> SavedTensor:
    layout = next((facts["layouts"][whole.key] for facts in said if whole.key in facts["layouts"]), None)
    boxes = tuple(
        SavedBox(box, said[rank]["file"], said[rank]["offsets"][number], said[rank]["sums"][number])
        for box, rank, number in whole.places
    )
    return SavedTensor(
        whole.key, dtype_named(whole.dtype), whole.shape, None if layout is None else layout_from(layout), boxes
    )
