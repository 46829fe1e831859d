"""`init_on`: modules that are made shard by shard, with the numbers that one device would have drawn.

A module's constructor makes tensors, and calls that fill them. Inside, both happen on the meta device, and are noted.
When everything is made, names are known, and so is where each parameter goes; then the calls are made again, in their
order, on tensors that are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm import AnyMesh, as_mesh, local_tensor
from shardwise.dispatch import implicit_replication
from shardwise.dispatch.planning.fallback import speaks_of_meta
from shardwise.dispatch.planning.randomness import drawn_shards
from shardwise.errors import NoDataError, PlacementError, PlanError
from shardwise.layout import Layout, Mesh, Placement, Replicate
from shardwise.parallel.agreement import agreed
from shardwise.parallel.api import Entry, parallelized, planned
from shardwise.parallel.loaded_state import take_any_state
from shardwise.parallel.modules import homes_of, keep, tensors_of
from shardwise.parallel.style import ParallelStyle
from shardwise.tensor import DTensor, distribute_tensor, wrap

Plan = Mapping[str, Any]

_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]

SIZED = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""What makes tensors of a size: of these, only shards are made."""


@contextmanager
def init_on(mesh: AnyMesh, plan: Plan | ParallelStyle | None = None) -> Iterator[None]:
    """Modules made inside have parameters on a mesh, bit for bit those of one device, and are made shard by shard.

    A plan gives placements by names of parameters, in which each part may have wildcards; what it does not name is
    replicated. Or it is a plan of `parallelize_module`, which is then applied; what it does not name stays plain, or is
    replicated beside styles by name (those of Hugging Face's models, which are made so as well).
    The whole of a parameter is never in memory where it is made by its size and filled in place, on a CPU. Constructors
    run without data: one that reads numbers of a tensor (`item()`, `if x.any()`) raises `NoDataError`, unless it makes
    that tensor with `device="cpu"`.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> with sw.init_on(mesh, {"weight": [sw.Shard(0)]}):
    ...     layer = torch.nn.Linear(4, 6)
    >>> layer.weight.placements, layer.bias.placements
    ((Shard(dim=0),), (Replicate(),))
    """
    mesh = as_mesh(mesh)
    noted = _Noted(torch.device(mesh.device_type))
    with ExitStack() as stack:
        for register, note in (
            (hooks.register_module_parameter_registration_hook, noted.owner),
            (hooks.register_module_buffer_registration_hook, noted.owner),
            (hooks.register_module_module_registration_hook, noted.child),
        ):
            stack.callback(register(note).remove)
        stack.enter_context(noted.instead_of(nn.init, "_no_grad_trunc_normal_"))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(noted)
        yield
    _materialise(noted, mesh, plan)


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: list[Tensor]


class _Noted(TorchFunctionMode):
    """What constructors do: calls, in their order, and modules."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[_Call] = []
        self.owners: dict[nn.Module, None] = {}
        self.children: set[nn.Module] = set()

    @contextmanager
    def instead_of(self, home: Any, name: str) -> Iterator[None]:
        """Note calls of a function that looks at the numbers it draws."""
        original = getattr(home, name)

        def note(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.calls.append(_Call(original, (x, *args), kwargs, [x]))
            return x

        setattr(home, name, note)
        try:
            yield
        finally:
            setattr(home, name, original)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False  # who asks would do nothing
        if func == _DEVICE and args[0].shape == (0,):  # who makes nothing, to ask for the default (transformers), too
            return self.device
        kwargs = kwargs or {}
        given = [x.is_meta for x in _tensors((args, kwargs))]
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise (_needs_numbers(func) if speaks_of_meta(error) else error) from None
        found = [x.is_meta for x in _tensors(out)]
        if any(given) and not all(found):
            raise _needs_numbers(func)  # which torch made up
        if any(given) or any(found):
            self.calls.append(_Call(func, tuple(args), dict(kwargs), _tensors(out)))
        return out

    def owner(self, module: nn.Module, name: str, x: Any) -> None:
        self.owners[module] = None

    def child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self.owners[module] = None
        if child is not None:
            self.children.add(child)

    @property
    def roots(self) -> list[nn.Module]:
        return [module for module in self.owners if module not in self.children]


def _needs_numbers(func: Callable) -> NoDataError:
    return NoDataError(
        f"{resolve_name(func) or func} needs numbers of a tensor, and inside init_on there are none yet: constructors "
        f"run on the meta device, and what they did is done again once it is known where each parameter goes. Make "
        f"tensors whose numbers a constructor needs, and what they are computed from, with device='cpu', or do without"
    )


def _materialise(noted: _Noted, mesh: Mesh, plan: Any) -> None:
    is_styles = isinstance(plan, ParallelStyle) or any(_is_style(part) for part in (plan or {}).values())
    place: Any = planned if is_styles else _placements
    placed = agreed(
        mesh,
        lambda: [(root, *place(root, mesh, plan or {})) for root in noted.roots],
        lambda found: [(tensors_of(root), where) for root, _, where in found],
        PlanError(f"init_on: the plan does not fit the modules that another rank of {mesh} makes"),
        PlanError(
            f"init_on: the ranks of {mesh} make different modules, or have different plans: names, shapes, dtypes, "
            f"what is trained, and placements must be the same on all of them"
        ),
    )
    for root, entries, where in placed:
        found = homes_of(root)
        names = {id(x): name for name, x in (*root.named_parameters(), *root.named_buffers())}
        replay = _Replay(mesh, {_key(x): where.get(names.get(id(x), "")) for x in found if x.is_meta})
        replay.run(noted.calls)
        for x, homes in found.items():
            if x.is_meta:
                keep(replay.tensor(x), homes)
        if is_styles:
            parallelized(root, mesh, entries)
        take_any_state(root.modules())


def _is_style(part: Any) -> bool:
    return isinstance(part, (ParallelStyle, str)) or (isinstance(part, Mapping) and any(map(_is_style, part.values())))


def _placements(root: nn.Module, mesh: Mesh, plan: Plan) -> tuple[list[Entry], dict[str, Sequence[Placement]]]:
    """Where parameters and buffers go, by their names. A name of the plan that is nobody's is a mistake."""
    names = [name for name, _ in (*root.named_parameters(), *root.named_buffers())]
    found: dict[str, Any] = dict.fromkeys(names, [Replicate()] * mesh.ndim)
    for pattern, placements in plan.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise PlanError(f"the plan names {pattern!r}, but no parameter of {type(root).__name__} is called so")
        found.update(dict.fromkeys(matching, placements))
    for name, x in (*root.named_parameters(), *root.named_buffers()):
        try:
            Layout.of(mesh, x.shape, found[name])
        except PlacementError as error:
            raise PlacementError(f"init_on: the plan does not fit {name}: {error}") from None
    return [], found


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


Key = tuple[Any, ...]


def _key(x: Tensor) -> Key:
    """The same for a parameter and the tensor that it was made of. All tensors are kept, so no memory is reused."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@dataclass(slots=True)
class _Replay:
    """Calls made again. `where` says how what is to stay is laid out, or None: plain."""

    mesh: Mesh
    where: dict[Key, Sequence[Placement] | None]
    made: dict[Key, Any] = field(default_factory=dict)

    def run(self, calls: Sequence[_Call]) -> None:
        last = {_key(x): at for at, call in enumerate(calls) for x in _tensors((call.args, call.kwargs, call.results))}
        ends: dict[int, list[Key]] = {}
        for key, at in last.items():
            if key not in self.where:  # only on the way to something
                ends.setdefault(at, []).append(key)
        with torch.no_grad(), torch.device(self.mesh.device_type), implicit_replication():
            for at, call in enumerate(calls):
                self._call(call)
                for key in ends.get(at, ()):
                    self.made.pop(key, None)

    def _call(self, call: _Call) -> None:
        placements = self.where.get(_key(call.results[0])) if len(call.results) == 1 else None
        if call.function in SIZED and placements is not None:
            self.made[_key(call.results[0])] = self._sharded(call, placements)
            return
        args, kwargs = tree_map_only(Tensor, self._real, (call.args, call.kwargs))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = self.mesh.device_type
        results = _tensors(call.function(*args, **kwargs))
        for noted, x in zip(call.results, results, strict=True):
            self.made.setdefault(_key(noted), x)  # what is written to in place is what it was

    def _sharded(self, call: _Call, placements: Sequence[Placement]) -> DTensor:
        layout = Layout.of(self.mesh, call.results[0].shape, placements)
        options = {name: value for name, value in call.kwargs.items() if name not in ("size", "device")}
        value = call.args[1:2] if call.function is torch.full else ()

        def make(shape: tuple[int, ...]) -> Tensor:
            return call.function(shape, *value, **options)

        is_random = call.function in (torch.rand, torch.randn)
        shards = drawn_shards(make, layout) if is_random else [make(shape) for shape in layout.held_shapes]
        return wrap(local_tensor(shards), layout)

    def _real(self, x: Tensor) -> Tensor:
        return self.made[_key(x)] if x.is_meta else x

    def tensor(self, x: Tensor) -> Tensor:
        """What a parameter or buffer has become."""
        real, placements = self.made[_key(x)], self.where[_key(x)]
        if placements is not None and not isinstance(real, DTensor):
            real = distribute_tensor(real, self.mesh.origin, placements, src_data_rank=None)
        if not isinstance(x, nn.Parameter):
            return real
        made = nn.Parameter(real, requires_grad=x.requires_grad)
        made.__dict__.update({name: value for name, value in x.__dict__.items() if name not in made.__dict__})
        return made
