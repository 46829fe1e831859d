"""Hugging Face's models whose parameters are sharded: their files read and written as `transformers` does.

Since its version 5 a model may have in memory what its files have otherwise: all experts as one tensor, say. How one
becomes the other is said by transformers' own conversions. Loading has them run on tensors without data, which shows
what is to be read (`recipes`); saving has them run on DTensors.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint import background
from shardwise.checkpoint.entries import state_of
from shardwise.checkpoint.files.file_sets import FileSet, find_files
from shardwise.checkpoint.files.folders import beside, make_folder, remove, remove_unfinished
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.models.load import Loaded, Strictness, load_with
from shardwise.checkpoint.models.reverted import as_transformers_has_it, reverted
from shardwise.checkpoint.models.save import check_storable, check_tensors_only, num_bytes_of, save_parts
from shardwise.checkpoint.models.sources import From
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.writers import parts_of
from shardwise.dispatch.interop.state_dicts import settled


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    process_group: Any = None,
) -> None:
    """What `model.save_pretrained(save_directory)` does, for a model of `transformers` whose parameters are sharded.

    The model writes its configuration and what else belongs to it. Its weights, as `from_pretrained` expects them, are
    written by all ranks, as `save` does. All ranks of the process group call it.
    """
    _check_is_pretrained(model)
    background.wait()
    ranks, doing, folder = Ranks(process_group), f"saving {save_directory}", Path(save_directory)
    ranks.agree(doing)
    room = ranks.all(doing, lambda: num_bytes_of(max_shard_size))
    made = reverted(model, ranks.all(doing, lambda: _tensors(model)), ranks, doing)
    ranks.all(doing, lambda: check_storable(made.tensors))
    parts, facts = parts_of({key: settled(x) for key, x in made.tensors.items()}, ranks)
    rest = ranks.first(doing, lambda: _saved_beside(model, folder))
    save_parts(*made.parts(parts, facts), folder, room, ranks)
    ranks.first(doing, lambda: _moved(rest, folder) if rest is not None else None)


def load_pretrained(
    model: Any,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = False,
    process_group: Any = None,
) -> Loaded:
    """Load the files of a model of `transformers` into one whose parameters are sharded, as `load` does, from the keys
    and by the conversions that `from_pretrained` would use.

    What the model says may be missing or left over in its files is no error. All ranks of the process group call it.
    """
    _check_is_pretrained(model)
    ranks = Ranks(process_group)
    sources = ranks.all(f"loading {path}", lambda: _sources(model, find_files(path)))
    ignored = [getattr(model, f"_keys_to_ignore_on_load_{which}", None) or () for which in ("missing", "unexpected")]
    return load_with(
        model,
        path,
        keys=lambda name: sources.get(name, name),
        ranks=ranks,
        strict=Strictness(*(tuple(map(re.compile, patterns)) for patterns in ignored)) if strict else None,
        verify=verify,
    )


def _check_is_pretrained(model: Any) -> None:
    if not callable(getattr(model, "save_pretrained", None)):
        raise TypeError(
            f"a {type(model).__name__} is no model of transformers; shardwise.checkpoint.save and load take any module"
        )


# Loading


def _sources(model: Any, files: FileSet) -> dict[str, From]:
    """What each parameter is read from. The loop is that of transformers' own loading."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    with as_transformers_has_it(model):
        transforms = mapping.get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = {name: True for entry in state_of(model)[0] for name in entry.names}
    found: dict[str, From] = {}
    converted: dict[str, _Conversion] = {}
    for key in sorted(files.keys, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = loading.rename_source_key(key, [], [], prefix, names)
        if name in names and pattern is None:
            found[name] = From(key)
        elif name in names:
            converted.setdefault(name, _Conversion(model, by_pattern[pattern], name, [])).members.append((key, pattern))
    for conversion in converted.values():
        keys = [key for key, _ in conversion.members]
        for name in conversion.names(files):
            found[name] = From(*keys, make=partial(conversion.made, name))
    return found


class _Conversion(NamedTuple):
    """What transformers makes of some keys, of which each came by a pattern."""

    model: Any
    converter: Any
    first: str
    members: list[tuple[str, str]]

    def names(self, files: FileSet) -> list[str]:
        """The parameters that are made."""
        stored = [files.keys[key] for key, _ in self.members]
        return list(self._all([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in stored]))

    def made(self, name: str, *tensors: Tensor) -> Tensor:
        return self._all(tensors)[name]

    def _all(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for (key, pattern), x in zip(self.members, tensors, strict=True):
            converter.add_tensor(self.first, key, pattern, x)
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


# Saving


def _tensors(model: Any) -> dict[str, Tensor]:
    entries, others = state_of(model)
    check_tensors_only(others, model)
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return {entry.name: entry.tensor.detach() for entry in entries if entry.name not in left_out}


def _saved_beside(model: Any, folder: Path) -> Path:
    """All but the weights, in a folder of its own: it would remove the weights that are there."""
    name = folder.parent / f"{folder.name}.config"
    make_folder(folder.parent)
    remove_unfinished(folder.parent, name.name)
    rest = beside(name)
    make_folder(rest)
    model.save_pretrained(rest, state_dict={})
    return rest


def _moved(rest: Path, folder: Path) -> None:
    with explained(f"move {rest} to {folder}"):
        for path in rest.iterdir():
            os.replace(path, folder / path.name)
    remove(rest)
