"""Steps of training, which `save_step` wrote. Their tensors are where state dicts have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.checkpoint.catalogue.items import Catalogue, Check, Item, RegionItem, at_hand
from shardwise.checkpoint.files import checksums
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.verifying import Claim
from shardwise.checkpoint.steps.index import INDEX, SavedTensor, StepIndex, read_index
from shardwise.checkpoint.steps.trees import decode
from shardwise.checkpoint.torch_files import Keys, key_of, leaves
from shardwise.errors import DamagedFileError
from shardwise.words import counted, dtype_name


def open_step(path: Path) -> Catalogue:
    index, files = read_index(path), Opened()
    index.check_files()
    items: dict[str, Item] = {}
    others: dict[Keys, Callable[[], Any]] = {}
    for keys, value in leaves(_state(index), tensor=_Named):
        if isinstance(value, _Named):
            key = key_of(keys) if key_of(keys) not in items else value.key  # keys may be 1 and "1"
            items[key] = _item(key, keys, index.tensors[value.key], index, files)
        else:
            others[keys] = at_hand(value)
    return Catalogue(path, "step", items, others, checks_of(index.claims(), files), files, _about(index))


def checks_of(claims: list[Claim], files: Opened) -> list[Check]:
    return [Check(claim.region.num_bytes, partial(_check, claim, files)) for claim in claims]


def _check(claim: Claim, files: Opened) -> None:
    checksums.check(files[claim.path], claim.region, claim.checksum, key=claim.key, begin=claim.begin)


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor of the step."""

    key: str


def _state(index: StepIndex) -> dict[str, Any]:
    try:
        return {name: _one_state(said) for name, said in index.state.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"this is no state of a step: {type(error).__name__}: {error}"
        raise DamagedFileError(what, index.folder / INDEX) from error


def _one_state(said: Mapping[str, Any]) -> Any:
    """As a state dict has it; if ranks have different ones, a list of theirs."""
    if "ranks" in said:
        return {"ranks": [None if one is None else _one_state({"all": one}) for one in said["ranks"]]}
    match said["all"]:
        case {"kind": "module", "tensors": tensors, "others": others}:
            return {name: _Named(key) for name, key in tensors.items()} | _decoded(others)
        case {"kind": "optimizer", "state": state, "groups": groups, "rest": rest}:
            return {"state": _decoded(state), "param_groups": _decoded(groups), **_decoded(rest)}
        case {"state": state}:
            return _decoded(state)
    raise ValueError(f"unknown kind {said['all'].get('kind')!r}")


def _decoded(said: Any) -> Any:
    return decode(said, _Named)


def _item(key: str, keys: Keys, tensor: SavedTensor, index: StepIndex, files: Opened) -> RegionItem:
    layout = "" if tensor.layout is None else tensor.layout.text.partition("] ")[2]
    regions = {saved.box: (index.folder / saved.file, tensor.region(saved)) for saved in tensor.boxes}
    return RegionItem(key, dtype_name(tensor.dtype), tensor.shape, tuple(regions), layout, keys, regions, files)


def _about(index: StepIndex) -> str:
    time = index.made_by.get("time", "")
    return f"step {index.step}, saved by {counted(index.num_ranks, 'rank')}{f' at {time}' if time else ''}"
