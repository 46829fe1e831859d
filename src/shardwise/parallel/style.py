"""Styles: how one module of a plan is parallelized. Its parameters become DTensors; hooks take its inputs to the layout
that it computes on, and its outputs to the one that the modules after it expect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.comm import AnyMesh, as_mesh
from shardwise.dispatch.interop.compiled import run_as_it_is
from shardwise.errors import MeshError, PlanError
from shardwise.layout import Placement, Replicate, Shard, unknown_placement
from shardwise.parallel.boundary import brought, named, normal, shared, to_local
from shardwise.parallel.fully_sharded.layouts import is_at_rest
from shardwise.parallel.modules import check_dense, check_no_parametrizations, place_rest
from shardwise.tensor import DTensor

_TORCHS_OWN = (
    *("_partition_linear_fn", "_partition_embedding_fn", "_replicate_module_fn", "_prepare_input_fn"),
    *("_prepare_output_fn", "_prepare_input_arg", "_prepare_input_kwarg_fn", "_prepare_out_fn"),
)
"""What subclasses of torch's styles define otherwise."""

Layouts = Placement | tuple[Placement | None, ...] | None
"""One tensor's placement, or one for each of several; None for what is left as it is."""


class ParallelStyle(ABC):
    """How a module is parallelized. Styles of your own define `_apply`, which returns the module.

    `parallelize_module` sets `src_data_rank` and `path`, the module's name in the model, before it calls `_apply`. It
    calls `_check` for the whole plan before it applies any of it: a style that does not fit raises `PlanError` there.
    """

    src_data_rank: int | None = 0
    path: str = ""

    def __init_subclass__(cls) -> None:
        ignored = [name for name in _TORCHS_OWN if hasattr(cls, name)]
        if ignored and cls._apply.__module__ == __name__:
            raise TypeError(
                f"{cls.__name__}: {', '.join(ignored)} would not be called: that is how torch's styles are made, and "
                f"not {cls.__mro__[1].__name__}. Define _apply, which may call distribute_module with such functions"
            )

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module: ...

    def _check(self, path: str, module: nn.Module, device_mesh: AnyMesh) -> None:  # noqa: B027
        """Raise if this style does not fit the module of that name."""


class Distributing(ParallelStyle):
    """A style that distributes a module's parameters, and moves its first input and its output."""

    use_local_output: bool

    @abstractmethod
    def _where(self, module: nn.Module) -> Mapping[str, Sequence[Placement]] | None:
        """Where the module's own parameters go, or None if the style does not know the module."""

    @abstractmethod
    def _moves(self, module: nn.Module) -> tuple[_Way, _Way]:
        """What a plain input is, and what it becomes; what a plain output would be, and what the output becomes."""

    def _check(self, path: str, module: nn.Module, device_mesh: AnyMesh) -> None:
        name, mesh = type(self).__name__, as_mesh(device_mesh)
        if mesh.ndim != 1:
            raise MeshError(
                f"{named(path)}: {name} takes a mesh of one axis, such as mesh[{mesh.names[-1]!r}], not {mesh}"
            )
        where = self._where(module)
        if where is None:
            raise PlanError(
                f"{named(path)}: {name} knows nn.Linear and nn.Embedding, not {type(module).__name__}; name its "
                f"layers in the plan, or subclass ParallelStyle"
            )
        check_no_parametrizations(named(path), name, module, where)
        if getattr(module, "_distribute_module_applied", False):
            raise PlanError(f"{named(path)} is parallelized already; {name} would run its hooks twice")
        check_dense(module)
        for parameter, tensor in module.named_parameters():
            wanted = tuple(where.get(parameter, [Replicate()]))
            if is_at_rest(module, tensor, mesh):
                continue
            if isinstance(tensor, DTensor) and (tensor.layout_on_mesh.mesh, tensor.placements) != (mesh, wanted):
                raise PlanError(
                    f"{named(path)}: its parameter {parameter!r} is a DTensor already, {tensor.layout_on_mesh}, and "
                    f"not as {name} would place it"
                )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        self._check(self.path, module, device_mesh)
        place_rest(module, device_mesh, self._where(module), src_data_rank=self.src_data_rank)
        enter, leave = self._moves(module)
        facts = as_mesh(device_mesh), self.path
        module.register_forward_pre_hook(partial(_enter, enter, *facts))
        module.register_forward_hook(partial(_leave, leave, self.use_local_output, *facts))
        module._distribute_module_applied = True  # type: ignore[assignment]
        return module

    def __repr__(self) -> str:
        return _shown(self, "input_layouts", "output_layouts", "use_local_output")


class ColwiseParallel(Distributing):
    """Shard a Linear by its outputs, or an Embedding by the numbers of each row: `[R] -> [S(-1)]`.

    A plain input is this rank's part of a tensor in `input_layouts` (replicated, unless said otherwise). The
    output is brought to `output_layouts` (unless said otherwise, it stays sharded along its last dim), and is this
    rank's plain part of it, or a DTensor with `use_local_output=False`.

    >>> import torch, shardwise as sw
    >>> from shardwise.parallel import ColwiseParallel, parallelize_module
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> layer = parallelize_module(torch.nn.Linear(4, 6), mesh, ColwiseParallel(use_local_output=False))
    >>> layer.weight.placements, layer(torch.ones(3, 4)).placements
    ((Shard(dim=0),), (Shard(dim=1),))
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _each(input_layouts or Replicate())
        self.output_layouts = _each(output_layouts or Shard(-1))
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output

    def _where(self, module: nn.Module) -> Mapping[str, Sequence[Placement]] | None:
        return _place(module, linear={"weight": Shard(0), "bias": Shard(0)}, embedding={"weight": Shard(1)})

    def _moves(self, module: nn.Module) -> tuple[_Way, _Way]:
        return (self.input_layouts, self.desired_input_layouts), ((Shard(-1),), self.output_layouts)


class RowwiseParallel(Distributing):
    """Shard a Linear by its inputs, `[S(-1)] -> [P]`, or an Embedding by its rows, `[R] -> [P]`.

    A plain input is this rank's part of a tensor in `input_layouts` (sharded along its last dim, unless said
    otherwise). The output is brought to `output_layouts` (replicated, unless said otherwise), and is this rank's plain
    part of it, or a DTensor with `use_local_output=False`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _each(input_layouts or Shard(-1))
        self.output_layouts = _each(output_layouts or Replicate())
        self.use_local_output = use_local_output

    def _where(self, module: nn.Module) -> Mapping[str, Sequence[Placement]] | None:
        return _place(module, linear={"weight": Shard(1)}, embedding={"weight": Shard(0)})

    def _moves(self, module: nn.Module) -> tuple[_Way, _Way]:
        computes_on: Placement = Shard(-1) if isinstance(module, nn.Linear) else Replicate()
        return (self.input_layouts, (computes_on,)), ((Replicate(),), self.output_layouts)


class SequenceParallel(Distributing):
    """Replicate a module's parameters and run it on a part of the sequence: layer norms, dropout and the like.

    A plain input is this rank's part of the sequence; a DTensor is brought there.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _where(self, module: nn.Module) -> Mapping[str, Sequence[Placement]] | None:
        return {}

    def _moves(self, module: nn.Module) -> tuple[_Way, _Way]:
        return (self.sequence_sharding, self.sequence_sharding), (self.sequence_sharding, None)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInput(ParallelStyle):
    """Take a module's inputs to other layouts before it runs.

    A plain input is this rank's part of a tensor in `input_layouts`; `desired_input_layouts` is what it
    becomes. There is one for each positional input, None for those that are left as they are; inputs by keyword are
    those that `input_kwarg_layouts` names. With `use_local_output` the module is given this rank's plain parts.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _each(input_layouts)
        self.desired_input_layouts = _each(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            _check_lengths("input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise PlanError(
                f"input_kwarg_layouts names {list(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{list(self.desired_input_kwarg_layouts)}: both name the same inputs"
            )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        facts = as_mesh(device_mesh), self.path
        module.register_forward_pre_hook(partial(_prepare_inputs, self, *facts), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        names = ("input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
        return _shown(self, *names, "use_local_output")


class PrepareModuleOutput(ParallelStyle):
    """Take a module's outputs to other layouts after it has run.

    A plain output is this rank's part of a tensor in `output_layouts`; `desired_output_layouts` is what
    it becomes, one for each output, None for those that are left as they are. With `use_local_output` what comes out
    are this rank's plain parts.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _each(output_layouts)
        self.desired_output_layouts = _each(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_lengths("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        module.register_forward_hook(partial(_prepare_outputs, self, as_mesh(device_mesh), self.path))
        return module

    def __repr__(self) -> str:
        return _shown(self, "output_layouts", "desired_output_layouts", "use_local_output")


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput`, with `use_local_input` for its `use_local_output`, and `PrepareModuleOutput`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        for part in (self.prepare_module_input, self.prepare_module_output):
            part.path = self.path
            part._apply(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input!r}, {self.prepare_module_output!r})"


# Hooks are functions of this module, so that modules that have them can be pickled and copied

_Way = tuple[tuple[Placement, ...], tuple[Placement, ...] | None]
"""What a plain tensor is taken for, and what it becomes."""


@run_as_it_is
def _enter(way: _Way, mesh: Any, path: str, module: nn.Module, inputs: tuple) -> tuple:
    if not inputs or not isinstance(inputs[0], Tensor):
        given = f"a {type(inputs[0]).__name__}" if inputs else "none"
        raise PlanError(f"{named(path)}: its first positional input must be a tensor; it was given {given}")
    x, (taken, wanted) = inputs[0], way
    shape = None
    if type(x) is Tensor and isinstance(module, nn.Linear) and normal(taken, x.dim()) == (Shard(x.dim() - 1),):
        shape = (*x.shape[:-1], module.in_features)  # the ranks' pieces may be uneven
    return shared(x, mesh, path, taken, wanted, shape), *inputs[1:]


@run_as_it_is
def _leave(way: _Way, local: bool, mesh: Any, path: str, module: nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, Tensor):
        raise PlanError(f"{named(path)}: its style moves one tensor; the module returned a {type(output).__name__}")
    if isinstance(output, Later):
        return output.moved(partial(_leave, way, local, mesh, path, module, inputs), way[1], module if local else None)
    found = brought(output, mesh, path, *way)
    return to_local(found, module) if local else found


class Later(Tensor):
    """The output of a module, computed when somebody asks for it."""

    def moved(
        self, move: Callable[[Tensor], Tensor], where: Sequence[Placement] | None, local: nn.Module | None
    ) -> Tensor:
        """What leaves the module: `move` brings what is computed to placements, and makes it plain for a module."""
        raise NotImplementedError


def is_styled(module: nn.Module) -> bool:
    """Whether a style moves the module's output."""
    return any(isinstance(hook, partial) and hook.func is _leave for hook in module._forward_hooks.values())


@run_as_it_is
def _prepare_inputs(
    style: PrepareModuleInput, mesh: Any, path: str, module: nn.Module, inputs: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if style.input_layouts is not None:
        inputs = _prepared(style, "input", mesh, path, module, inputs)
    taken, wanted, local = style.input_kwarg_layouts, style.desired_input_kwarg_layouts, style.use_local_output
    facts = module if local else None, path
    prepared = {name: _prepare(x, mesh, taken.get(name), wanted.get(name), *facts) for name, x in kwargs.items()}
    return inputs, prepared


@run_as_it_is
def _prepare_outputs(
    style: PrepareModuleOutput, mesh: Any, path: str, module: nn.Module, inputs: Any, outputs: Any
) -> Any:
    prepared = _prepared(style, "output", mesh, path, module, outputs if isinstance(outputs, tuple) else (outputs,))
    return prepared[0] if len(prepared) == 1 else prepared


def _prepared(style: Any, kind: str, mesh: Any, path: str, module: nn.Module, values: tuple) -> tuple:
    taken, wanted = getattr(style, f"{kind}_layouts"), getattr(style, f"desired_{kind}_layouts")
    if len(values) != len(taken):
        raise PlanError(f"{named(path)}: {kind}_layouts has {len(taken)} entries for {len(values)} {kind}s")
    facts = module if style.use_local_output else None, path
    return tuple(_prepare(x, mesh, a, b, *facts) for x, a, b in zip(values, taken, wanted, strict=True))


def _prepare(
    x: Any, mesh: Any, taken: Placement | None, wanted: Placement | None, local: nn.Module | None, path: str
) -> Any:
    """`local`: the module for which it is made plain again."""
    if taken is None:
        return x
    if not isinstance(x, Tensor):
        raise PlanError(
            f"{named(path)}: {taken!r} is a layout of a tensor; found a {type(x).__name__} (say None for it)"
        )
    found = brought(x, mesh, path, (taken,), None if wanted is None else (wanted,))
    return found if local is None else to_local(found, local)


def _place(
    module: nn.Module, *, linear: Mapping[str, Placement], embedding: Mapping[str, Placement]
) -> Mapping[str, Sequence[Placement]] | None:
    for kind, where in ((nn.Linear, linear), (nn.Embedding, embedding)):
        if isinstance(module, kind):
            return {name: [placement] for name, placement in where.items()}
    return None


def _each(layouts: Layouts) -> Any:
    each = layouts if layouts is None or isinstance(layouts, (tuple, list)) else (layouts,)
    for placement in each or ():
        if placement is not None and not isinstance(placement, Placement):
            raise unknown_placement(placement)
    return each if each is None else tuple(each)


def _check_lengths(name: str, taken: Any, wanted: Any) -> None:
    if wanted is None or taken is None or len(taken) != len(wanted):
        counts = " and ".join("none" if x is None else str(len(x)) for x in (taken, wanted))
        raise PlanError(
            f"{name} and desired_{name} have one entry each for every {name.split('_')[0]}; they have {counts}"
        )


def _shown(style: ParallelStyle, *names: str) -> str:
    return f"{type(style).__name__}({', '.join(f'{name}={getattr(style, name)}' for name in names)})"
