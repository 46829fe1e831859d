"""`parallelize_module`: a plan says by name which module is parallelized in which style."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from shardwise.comm import AnyMesh, as_mesh
from shardwise.errors import PlanError
from shardwise.layout import Mesh, Placement, Replicate
from shardwise.parallel.agreement import agreed
from shardwise.parallel.loaded_state import take_any_state
from shardwise.parallel.modules import check_dense, tensors_of, tied
from shardwise.parallel.named_styles import NamedStyle, replicate_inside
from shardwise.parallel.parts import compare_calls
from shardwise.parallel.style import Distributing, ParallelStyle

Entry = tuple[str, nn.Module, ParallelStyle]
"""A module's name, the module, and the style it gets."""


def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a module, in place, as a plan says: one style for the module itself, or styles by the names of its
    submodules.

    Each part of a name may have wildcards (`"layers.*.mlp.up"`); `""` is the module itself; plans may be nested. The
    whole plan is checked first: a name that is no module's, a style that does not fit its module, or a parameter that
    is a DTensor already raise before anything is distributed. Weights that modules share stay shared. The mesh, that of
    the `with` block around by default, has one axis: `mesh["tp"]`. Values are those of the rank numbered
    `src_data_rank`; None means all ranks have them already.

    >>> import torch, shardwise as sw
    >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    >>> mesh = sw.simulate((2, 2), ("dp", "tp"))
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> _ = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> net[0].weight.placements, net[2].weight.placements, net(torch.ones(3, 4)).shape
    ((Shard(dim=0),), (Shard(dim=1),), torch.Size([3, 4]))
    """
    mesh = as_mesh(device_mesh)
    entries = _agreed(mesh, module, parallelize_plan, src_data_rank)
    if parallelize_plan is None:
        warnings.warn("parallelize_module was given no plan: nothing is parallelized", stacklevel=2)
        return module
    return parallelized(module, mesh, entries, src_data_rank)


def parallelized(module: nn.Module, mesh: Mesh, entries: list[Entry], src_data_rank: int | None = 0) -> nn.Module:
    """What a plan makes of a module that it was found to fit."""
    with tied(module):
        for path, submodule, style in entries:
            style.src_data_rank, style.path = src_data_rank, path
            made = style._apply(submodule, mesh.origin)
            if submodule is module:
                module = made
    if _by_names(entries):
        replicate_inside(module, mesh.origin, src_data_rank)
    else:
        compare_calls(module, mesh)
    take_any_state(module.modules())
    return module


def _agreed(mesh: Mesh, module: nn.Module, plan: Any, src_data_rank: int | None) -> list[Entry]:
    """What a plan says, once every rank has found that it fits, and that all ranks have the same modules."""
    name = "parallelize_module"
    return agreed(
        mesh,
        lambda: _checked(mesh, module, plan),
        lambda entries: (_facts(module, entries), src_data_rank),
        PlanError(f"{name}: the plan does not fit the module that another rank of {mesh} has"),
        PlanError(
            f"{name}: the ranks of {mesh} have different modules or plans: names, shapes, dtypes, what is trained, "
            f"styles and src_data_rank must be the same on all of them"
        ),
    )


def _checked(mesh: Mesh, module: nn.Module, plan: Any) -> list[Entry]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize_module takes a torch.nn.Module, not a {type(module).__name__}")
    entries = [] if plan is None else _without_repeats(_entries("", module, plan))
    for path, submodule, style in entries:
        style._check(path, submodule, mesh.origin)
    _check_overlaps(entries)
    if _by_names(entries):
        _check_outputs(entries)
        check_dense(module)
    return entries


def _by_names(entries: list[Entry]) -> bool:
    return any(isinstance(style, NamedStyle) for _, _, style in entries)


def _facts(module: nn.Module, entries: list[Entry]) -> object:
    return tensors_of(module), [(path, _words(style)) for path, _, style in entries]


def _words(style: ParallelStyle) -> str:
    """What ranks compare of a style. Those of users may say of themselves what is another rank's otherwise."""
    return repr(style) if type(style).__module__.startswith("shardwise.") else type(style).__name__


def planned(module: nn.Module, mesh: Mesh, plan: Any) -> tuple[list[Entry], dict[str, Sequence[Placement]]]:
    """What a plan of styles says, and where it puts parameters and buffers, by their names. Those that it leaves to
    styles of users, or plain, are not among them."""
    entries, found = _checked(mesh, module, plan), dict[Tensor, Sequence[Placement]]()
    for _, submodule, style in entries:
        if isinstance(style, NamedStyle):
            for parameter in style._parameters(submodule).values():
                found.setdefault(parameter, [style.meaning.placement(parameter)])
        elif isinstance(style, Distributing):
            where = style._where(submodule) or {}
            for name, tensor in (*submodule.named_parameters(), *submodule.named_buffers()):
                found.setdefault(tensor, where.get(name, [Replicate()]))
    names = (*module.named_parameters(), *module.named_buffers())
    if _by_names(entries):
        return entries, {name: found.get(tensor, [Replicate()]) for name, tensor in names}
    return entries, {name: found[tensor] for name, tensor in names if tensor in found}


def _entries(path: str, module: nn.Module, plan: Any, carried: frozenset[str] = frozenset()) -> Iterator[Entry]:
    """What a plan says, module by module, in its order. Names that the model carries in a plan of its own are written
    for all of its kind: not every model has such a layer."""
    if isinstance(plan, ParallelStyle):
        yield path, module, plan
    elif isinstance(plan, str):
        yield path, module, NamedStyle(plan, path)
    elif isinstance(plan, Mapping):
        carried = carried.union(*(getattr(module, name, None) or () for name in ("_tp_plan", "_ep_plan")))
        for name, part in plan.items():
            found = list(_matches(path, module, name.split("."))) if name else [(path, module)]
            for inner_path, inner in found:
                yield from _entries(inner_path, inner, part)
            if not found:
                found_parameters = list(_parameters(path, module, name, part)) if isinstance(part, str) else []
                if not found_parameters and name not in carried:
                    raise PlanError(_no_module(path, module, name))
                yield from found_parameters
    else:
        where, home = f" for {path!r}" if path else "", type(plan).__module__
        if isinstance(plan, type):
            raise TypeError(f"a plan is made of styles, not of their classes: write {plan.__name__}(...){where}")
        remedy = " of torch's; import it from shardwise.parallel" if home.startswith("torch.") else ""
        raise TypeError(
            f"a plan is a ParallelStyle, or a dict of them by module name; got a {type(plan).__name__}{where}{remedy}"
        )


def _parameters(path: str, module: nn.Module, name: str, style: str) -> Iterator[Entry]:
    """The parameters whose names match a pattern, each as its module and a style for it alone."""
    *parts, last = name.split(".")
    for inner_path, inner in _matches(path, module, parts) if parts else [(path, module)]:
        for parameter in inner._parameters:
            if fnmatchcase(parameter, last):
                yield inner_path, inner, NamedStyle(style, f"{inner_path}.{parameter}", parameter)


def _matches(path: str, module: nn.Module, parts: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose names match a pattern, part by part."""
    for name, child in module.named_children():
        if fnmatchcase(name, parts[0]):
            inner = f"{path}.{name}" if path else name
            if len(parts) == 1:
                yield inner, child
            else:
                yield from _matches(inner, child, parts[1:])


def _no_module(path: str, module: nn.Module, name: str) -> str:
    names = [found for found, _ in module.named_modules() if found]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; similar names: {', '.join(map(repr, near))}" if near else f"; its children: {_children(module)}"
    return f"the plan names {name!r}, but no module of {path or type(module).__name__} is called so{hint}"


def _children(module: nn.Module) -> str:
    return ", ".join(repr(name) for name, _ in module.named_children()) or "none"


def _without_repeats(entries: Iterator[Entry]) -> list[Entry]:
    """A module that is found under several names gets a style once."""
    found: dict[tuple[int, int], Entry] = {}
    for entry in entries:
        found.setdefault((id(entry[1]), id(entry[2])), entry)
    return list(found.values())


def _check_overlaps(entries: list[Entry]) -> None:
    """The parameters of a module are distributed by one style."""
    claimed: dict[nn.Module, str] = {}
    for path, module, style in entries:
        for inner in module.modules() if isinstance(style, Distributing) else ():
            name = f"{path or 'the module'} ({type(style).__name__})"
            if inner in claimed:
                raise PlanError(f"two entries of the plan distribute the same parameters: {claimed[inner]} and {name}")
            claimed[inner] = name


def _check_outputs(entries: list[Entry]) -> None:
    """Beside styles by name, plain tensors are taken as replicated."""
    for path, _, style in entries:
        gives_out_parts = {*getattr(style, "output_layouts", ())} - {Replicate(), None}
        if gives_out_parts and getattr(style, "use_local_output", False):
            raise PlanError(
                f"module {path!r}: in a plan with styles by name, plain tensors are taken as replicated, and the parts "
                f"that {style} would give out are not; say use_local_output=False"
            )
