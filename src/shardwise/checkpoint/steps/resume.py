"""`load_latest`: go on from the last step that is whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint import background as in_background
from shardwise.checkpoint.entries import replace, was_written, with_memory
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.safetensors import Stored
from shardwise.checkpoint.files.verifying import verify as check_claims
from shardwise.checkpoint.models.load import fill_tensor, says_what_was_changed
from shardwise.checkpoint.models.stored_views import Source, View, is_converted
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.steps.folders import steps_in
from shardwise.checkpoint.steps.index import INDEX, SavedTensor, StepIndex, read_index
from shardwise.checkpoint.steps.random_states import check_random_states, restore_random_states
from shardwise.checkpoint.steps.training_state import check_kinds, decoded, names_of_parameters, undone
from shardwise.comm import ranked
from shardwise.errors import CheckpointError, CheckpointFileError, CheckpointWarning, DamagedFileError
from shardwise.layout import Layout
from shardwise.tensor import DTensor, wrap
from shardwise.words import dtype_name


def load_latest(
    directory: str | os.PathLike[str],
    *,
    verify: bool = True,
    random: bool = True,
    process_group: Any = None,
    **state: Any,
) -> int | None:
    """Go on from the last step that `save_step` has saved in a directory: its number, or None if there is none yet.

    `state` names what to load it into, as it was named when it was saved; what is not named is not loaded. The mesh,
    the layouts and the number of ranks may be others than they were. The data are compared with their checksums first
    (unless `verify` is False), each rank reading a share of them. A step that is damaged is passed over, with a
    CheckpointWarning that says what is wrong with it, for the last one that is whole; if none is, all ranks raise.
    Nothing is changed before all of this is known, and that the state fits. All ranks of the process group call it.

    >>> import torch, shardwise as sw
    >>> model, progress = torch.nn.Linear(4, 2), {"position": 0}
    >>> sw.checkpoint.load_latest("a-run", model=model, progress=progress) is None
    True
    >>> _ = sw.checkpoint.save_step("a-run", step=3, model=model, progress={"position": 192})
    >>> sw.checkpoint.load_latest("a-run", model=model, progress=progress), progress
    (3, {'position': 192})
    """
    in_background.wait()
    ranks = Ranks(process_group)
    directory = Path(directory)
    doing = f"loading the latest step in {directory}"
    ranks.agree(doing)
    ranks.all(doing, lambda: check_kinds(state))
    folders = ranks.told(ranks.first(doing, lambda: _folders(directory)))
    index, damage = _first_whole([Path(folder) for folder in folders], ranks, doing, verify=verify)
    if index is None and not damage:
        return None
    if index is None:
        raise DamagedFileError(f"no step in {directory} is whole. " + ". ".join(damage))
    _load(index, state, ranks, random=random)
    for what in damage:
        warnings.warn(
            f"step {index.step} was loaded, because a later one is damaged: {what}", CheckpointWarning, stacklevel=2
        )
    return index.step


def load_step(
    path: str | os.PathLike[str], *, verify: bool = True, random: bool = True, process_group: Any = None, **state: Any
) -> int:
    """Load one step, by its folder, as `load_latest` does. If it is damaged, all ranks raise."""
    in_background.wait()
    ranks = Ranks(process_group)
    doing = f"loading {path}"
    ranks.agree(doing)
    ranks.all(doing, lambda: check_kinds(state))
    ranks.first(doing, lambda: _check_is_no_run(Path(path)))
    index, damage = _first_whole([Path(path)], ranks, doing, verify=verify)
    if index is None:
        raise DamagedFileError(damage[0])
    _load(index, state, ranks, random=random)
    return index.step


def _check_is_no_run(path: Path) -> None:
    if steps_in(path):
        raise CheckpointError(f"{path} has steps of training: name one of them, or go on from the latest: load_latest")


def _folders(directory: Path) -> list[str]:
    """The steps, the latest first."""
    if (directory / INDEX).exists():
        raise CheckpointError(f"{directory} is a step: load it with load_step, or the latest in {directory.parent}")
    return [str(folder.path) for folder in reversed(steps_in(directory))]


def _first_whole(
    folders: Sequence[Path], ranks: Ranks, doing: str, *, verify: bool
) -> tuple[StepIndex | None, list[str]]:
    """The first that no rank finds anything wrong with, and what is wrong with those before."""
    damage: list[str] = []
    for folder in folders:
        index, wrong = ranks.all(doing, partial(_looked_at, folder, ranks, verify))
        found = next((one for one in ranks.gather(wrong) if one is not None), None)
        if found is None:
            return index, damage
        damage.append(found)
    return None, damage


def _looked_at(folder: Path, ranks: Ranks, verify: bool) -> tuple[StepIndex | None, str | None]:
    """The index, or what is wrong with the step, as far as this rank looks."""
    try:
        index = read_index(folder)
        index.check_files(number=ranks.number, count=ranks.count)
        if verify:
            check_claims(index.claims(), number=ranks.number, count=ranks.count)
    except (DamagedFileError, CheckpointFileError) as error:
        return None, str(error)
    return index, None


# Into the program's state


def _load(index: StepIndex, state: Mapping[str, Any], ranks: Ranks, *, random: bool) -> None:
    """Whatever is new is read first; what is written over comes last, when all else has succeeded."""
    doing = f"loading {index.folder}"
    plan = ranks.all(doing, lambda: _Plan.of(index, state, ranks, random=random))
    ranks.all(doing, lambda: plan.read(plan.new))
    undo = [undone(value) for value in state.values()]
    try:
        ranks.all(doing, plan.apply)
    except BaseException:
        for one in undo:
            one()
        raise
    with says_what_was_changed(*plan.modules):
        ranks.all(doing, lambda: plan.read(plan.in_place))
    plan.show()
    if random:
        restore_random_states(index.random, ranks.number)


class _Wanted(NamedTuple):
    """A saved tensor, and what it is read into."""

    saved: SavedTensor
    target: Tensor


@dataclass(slots=True)
class _Plan:
    """What is read for a program's state, and what is done then. Of modules, tensors with memory are read into what is
    there."""

    index: StepIndex
    new: list[_Wanted] = field(default_factory=list)
    in_place: list[_Wanted] = field(default_factory=list)
    modules: dict[nn.Module, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    changes: dict[str, Callable[[], None]] = field(default_factory=dict)

    @staticmethod
    def of(index: StepIndex, state: Mapping[str, Any], ranks: Ranks, *, random: bool) -> _Plan:
        plan, names = _Plan(index), names_of_parameters(state)
        for name, value in state.items():
            with plan._making(name):
                plan._add(name, _said_of(name, index, ranks), value, names)
        if random:
            with plan._making("the state of random numbers"):
                check_random_states(index.random, ranks.number)
        return plan

    @contextmanager
    def _making(self, name: str) -> Iterator[None]:
        """Inside, something is made of what was saved, which may be anything."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{name} cannot be made of what {self.index.folder} has: {error!r}") from error

    def _add(self, name: str, said: Any, value: Any, names: Mapping[int, str]) -> None:
        wanted, change = decoded(name, said, value, names, self._make)
        self.changes[name] = change
        if isinstance(value, optim.Optimizer):
            _check_has_memory(name, value)
        for key, x in wanted:
            _check_fits(self.index.tensors[key], x)
            target = with_memory(x)
            self.in_place.append(_Wanted(self.index.tensors[key], target))
            self.modules.setdefault(value, []).append((x, target))

    def _make(self, key: str, like: Tensor | None) -> Tensor:
        wanted = _Wanted(self.index.tensors[key], made_like(self.index.tensors[key], like))
        self.new.append(wanted)
        return wanted.target

    def read(self, wanted: Sequence[_Wanted]) -> None:
        with Opened() as files:
            for one in wanted:
                fill_tensor(one.target, sources_in(self.index.folder, one.saved), files)

    def apply(self) -> None:
        for name, change in self.changes.items():
            with self._making(name):
                change()

    def show(self) -> None:
        was_written(one.target for one in self.in_place)
        for module, pairs in self.modules.items():
            replace(module, pairs)


def _said_of(name: str, index: StepIndex, ranks: Ranks) -> Any:
    """What was saved under a name: by all ranks, or by each of as many as there are now."""
    if name not in index.state:
        raise CheckpointError(
            f"{index.folder} has nothing under the name {name!r}; it has {', '.join(map(repr, index.state))}"
        )
    kept = index.state[name]
    if "all" in kept:
        return kept["all"]
    if len(kept["ranks"]) != ranks.count:
        raise CheckpointError(
            f"{name!r} was not the same on the {len(kept['ranks'])} ranks that saved it, and there are {ranks.count} "
            f"now: leave it out, or save what is the same on all ranks"
        )
    if kept["ranks"][ranks.number] is None:
        raise CheckpointError(f"rank {ranks.number} has saved nothing under the name {name!r}")
    return kept["ranks"][ranks.number]


def _check_fits(saved: SavedTensor, x: Tensor) -> None:
    if saved.shape != tuple(x.shape) or not is_converted(saved.dtype, x.dtype):
        was = f"{dtype_name(saved.dtype)} {list(saved.shape)}"
        raise CheckpointError(f"{saved.key!r} was saved as {was}, and is {dtype_name(x.dtype)} {list(x.shape)} now")
    if isinstance(x, DTensor) and x._layout.has_pending:
        raise CheckpointError(f"{saved.key!r} is {x._layout}: reduce what is pending on it first, with redistribute")


def _check_has_memory(name: str, optimizer: optim.Optimizer) -> None:
    if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
        raise CheckpointError(
            f"{name} has parameters on the meta device, which loading replaces: make the optimizer when the model has "
            f"memory, with to_empty or shardwise.init_on"
        )


def made_like(saved: SavedTensor, like: Tensor | None) -> Tensor:
    """A tensor to read a saved one into: of an optimizer's state, to lie like the parameter; of a dict's, like the
    tensor that is there now."""
    layout = _layout_like(saved, like)
    if layout is None:
        device = "cpu" if like is None or not saved.shape else like.device
        return torch.empty(saved.shape, dtype=saved.dtype, device=device)
    device = like.device if like is not None else layout.mesh.device_type
    shards = [torch.empty(shape, dtype=saved.dtype, device=device) for shape in layout.held_shapes]
    return wrap(shards[0] if len(shards) == 1 else ranked(shards), layout)


def _layout_like(saved: SavedTensor, like: Tensor | None) -> Layout | None:
    """None for a plain tensor."""
    if like is None and saved.layout is not None:
        raise CheckpointError(
            f"{saved.key!r} was saved as a DTensor, and nothing shows where its shards belong now: have a DTensor in "
            f"its place when it is loaded"
        )
    if not isinstance(like, DTensor):
        return None
    layout = like._layout.with_(pending=[None] * like._layout.mesh.ndim)
    if saved.layout is None and (not saved.shape or saved.shape != layout.shape):
        return None
    if saved.shape == layout.shape:
        return layout
    assert saved.layout is not None
    return saved.layout.on(layout.mesh, saved.shape) or Layout(layout.mesh, saved.shape)


def sources_in(folder: Path, saved: SavedTensor) -> list[Source]:
    """What a saved tensor is read from."""
    found = []
    for box in saved.boxes:
        region = saved.region(box)
        stored = Stored(folder / box.file, saved.key, "", region.sizes, box.offset, region.num_bytes)
        found.append(Source(box.box[0], tuple((size,) for size in box.box[1]), View(stored, region)))
    return found
