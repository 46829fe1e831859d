"""Backward passes and gradient hooks: torch's engine runs on the shards, users see DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from shardwise.comm import captured_mesh, noters, shards_of
from shardwise.comm.ranked import as_list
from shardwise.comm.rendezvous import Rendezvous, expect, rendezvous, rendezvous_of
from shardwise.dispatch.aliasing.result_strides import with_strides_of
from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.interop.anomalies import anywhere, dispatch_modes, run_backward
from shardwise.dispatch.interop.autograd_function import joined_gradients
from shardwise.dispatch.interop.nodes import Handles, nodes_of
from shardwise.layout import Layout, Mesh
from shardwise.redistribute import (
    alone,
    anchors,
    flush,
    forget,
    handed_out,
    let_go,
    own_node,
    second_order,
    trail,
    unreduced,
)
from shardwise.tensor import DTensor, as_layout, gradient_shards, gradient_tensor, kernels_see, localise, observe

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled
_enabled = torch._C._is_torch_function_enabled
_users_code = torch._C._EnableTorchFunction  # which a pass may have disabled
_numel = torch._C.TensorBase.numel
_anomaly = torch._C.is_anomaly_enabled
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_put_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


# Backward passes. The engine is called directly, with `__torch_function__` on: hooks, user-written functions and
# recomputed parts that it runs work with DTensors.


@handles(Tensor.backward)
def _tensor_backward(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    _run_backward([given["self"]], [given.get("gradient")], given)


def _backward(
    self: DTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`loss.backward()`, without torch's argument parser; and in the ordinary case, of a tensor on which nothing is
    pending, with a gradient that lies as it does or needs none, straight to the engine."""
    facts, layout = self.__dict__, self._layout
    simple = inputs is None and not create_graph and len(facts) == 1 and not layout.has_pending  # nothing but a layout
    plain = _enabled() and not _anomaly() and not dispatch_modes()
    if simple and plain and _fits(gradient, layout):
        forget(layout.mesh)
        if gradient is None:
            with _disabled():
                seed = torch.ones_like(self)
        else:
            seed = localise(gradient)  # type: ignore[arg-type]
        _engine_run_backward(
            (self,), (seed,), bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True
        )
        if unreduced:
            flush((layout.mesh,))
    else:
        Tensor.backward(self, gradient, retain_graph, create_graph, inputs)


def _fits(gradient: Tensor | None, layout: Layout) -> bool:
    """Whether a pass may begin with a gradient as it is."""
    if gradient is None:
        return layout.numel == 1
    return gradient.__class__ is DTensor and gradient._layout is layout


DTensor.backward = _backward  # type: ignore[assignment]


@handles(torch.autograd.backward)
def _autograd_backward(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = as_list(given["tensors"])
    gradients = given.get("grad_tensors")
    _run_backward(tensors, [None] * len(tensors) if gradients is None else as_list(gradients), given)


def _run_backward(tensors: list[Tensor], gradients: list[Tensor | None], given: dict[str, Any]) -> None:
    meshes = _meshes(tensors)
    for mesh in meshes:
        forget(mesh)
    roots, seeds = _roots(tensors, gradients)
    inputs = given.get("inputs")
    if inputs is not None and not isinstance(inputs, Tensor) and not len(inputs):
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    wanted, retain = () if inputs is None else _flat(as_list(inputs)), given.get("retain_graph")
    to_reach = (*wanted, *anchors(wanted)) if wanted else ()
    options = {"allow_unreachable": True, "accumulate_grad": True}
    if not given.get("create_graph"):
        run_backward(meshes, roots, seeds, bool(retain), False, to_reach, **options)
    else:
        below = second_order(nodes_of(roots))
        let_go()
        before = [(x, _raw_grad(x)) for x in wanted or below]
        with trail() as own:
            run_backward(meshes, roots, seeds, retain is not False, True, to_reach, **options)
        let_go()
        reached = _by_tensor([x for x, old in before if _raw_grad(x) is not old])
        grads = [[grad for x in shards if (grad := _raw_grad(x)) is not None] for shards in reached]
        made = handed_out(grads, roots, own, _next_reached(roots, below, retain), _one_of(meshes))
        for x, grad in zip(chain(*reached), chain(*made), strict=True):
            _set_raw_grad(x, grad)
    if unreduced:
        flush(meshes)


def _meshes(tensors: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(x._layout.mesh for x in tensors if isinstance(x, DTensor)))


def _next_reached(roots: Sequence[Tensor], leaves: Sequence[Tensor], retain: bool | None) -> list[Tensor]:
    """What a pass that comes next must reach, whatever the gradients of each rank depend on: all of the graph, or, if
    that is not to be kept, its leaves."""
    return [x for x in (leaves if retain is False else roots) if x.requires_grad]


def _one_of(meshes: Sequence[Mesh]) -> Mesh | None:
    """The mesh whose ranks all make a pass, if there is one."""
    return meshes[0] if len(meshes) == 1 else None


def _by_tensor(leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """Shards, those of one tensor together."""
    known = {id(x) for x in leaves}
    peers = {id(peer) for x in leaves for peer in x.__dict__.get("_peers", ())}
    tensors = [shards_of(x) for x in leaves if id(x) not in peers]
    return [[shard for shard in shards if id(shard) in known] for shards in tensors]


def _raw_grad(leaf: Tensor) -> Tensor | None:
    with _disabled():
        return _get_grad(leaf)


def _set_raw_grad(leaf: Tensor, grad: Tensor) -> None:
    with _disabled():
        _put_grad(leaf, grad)


@handles(torch.autograd.grad)
def _autograd_grad(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs, inputs = as_list(given["outputs"]), as_list(given["inputs"])
    gradients = given.get("grad_outputs")
    if given.get("is_grads_batched"):
        raise NotImplementedError("torch.autograd.grad(is_grads_batched=True) is not available for DTensors")
    for mesh in _meshes([*outputs, *inputs]):
        forget(mesh)
    roots, seeds = _roots(outputs, [None] * len(outputs) if gradients is None else as_list(gradients))
    create, retain, unused = (given.get(name) for name in ("create_graph", "retain_graph", "allow_unused"))
    below = second_order(nodes_of(roots)) if create else []
    materialize = bool(given.get("materialize_grads", False))
    flat = _flat(inputs)
    with alone(), trail() as own:
        found: Sequence[Tensor | None] = run_backward(
            _meshes(outputs),
            roots,
            seeds,
            bool(create) if retain is None else retain,
            bool(create),
            (*flat, *anchors(flat)),
            True,  # anchors may be
            accumulate_grad=False,
        )[: len(flat)]
    per_input = _by_input(inputs, found)
    if not (materialize if unused is None else unused) and any(grads is None for grads in per_input):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
            "if this is the desired behavior."
        )
    if create:
        kept = [grads for grads in per_input if grads is not None]
        made = iter(handed_out(kept, roots, own, _next_reached(roots, below, retain), _one_of(_meshes(outputs))))
        per_input = [None if grads is None else next(made) for grads in per_input]
    with torch.set_grad_enabled(bool(create)):
        return tuple(
            (torch.zeros_like(x) if materialize else None) if grads is None else _gradient(x, grads, bool(create))
            for x, grads in zip(inputs, per_input, strict=True)
        )


def _gradient(x: Tensor, grads: Sequence[Tensor], create: bool) -> Tensor:
    if not isinstance(x, DTensor):
        return grads[0]
    own = grads if create else [grad.detach() for grad in grads]
    return with_strides_of(x, gradient_tensor(own, x._layout, ours=True))


def _by_input(inputs: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Sequence[Tensor] | None]:
    """For each input the gradients of its shards, or None if it has none."""
    in_order = iter(grads)
    held = [shards_of(x) if isinstance(x, DTensor) else (x,) for x in inputs]
    return [_of_all(x, y, [grad for _, grad in zip(y, in_order)]) for x, y in zip(inputs, held, strict=True)]


def _of_all(x: Tensor, shards: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
    """An empty shard has a gradient, even if torch has none, if others do; and in the simulator any has if one does."""
    if not isinstance(x, DTensor) or not x._layout.numel:
        return None if any(grad is None for grad in grads) else [grad for grad in grads if grad is not None]
    with _disabled(), torch.no_grad():
        lacking = [grad is None and bool(_numel(y)) for y, grad in zip(shards, grads, strict=True)]
        found = any(grad is not None and _numel(y) for y, grad in zip(shards, grads, strict=True))
        if x._layout.has_empty:
            found = not anywhere(x._layout.mesh, lacking) or found
        return [torch.zeros_like(y) if g is None else g for y, g in zip(shards, grads, strict=True)] if found else None


def _roots(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[tuple, tuple]:
    """The tensors a backward pass starts at and the gradients it starts from, shard by shard."""
    roots: list[Tensor] = []
    seeds: list[Tensor | None] = []
    for x, gradient in zip(tensors, gradients, strict=True):
        _refuse_edge(x)
        if isinstance(x, DTensor):
            x = _with_sums_only(x)
            seeds += _seed(x, gradient)
            roots += _uses(x)
        else:
            roots.append(x)
            seeds.append(_plain_seed(x, gradient))
    expect(nodes_of(roots))
    return tuple(roots), tuple(seeds)


def _with_sums_only(x: DTensor) -> DTensor:
    """The tensor with reductions other than sums done, so that its gradient has the seed's layout."""
    keep = [p if p is not None and p.reduce_op == "sum" else None for p in x._layout.pending]
    with torch.enable_grad():  # a pass may begin where nothing is recorded, as that of a reentrant checkpoint does
        return as_layout(x, x._layout.with_(pending=keep), "self")


def _seed(x: DTensor, gradient: Tensor | None) -> list[Tensor]:
    """The gradient that a backward pass starts from, per held rank, in the layout of gradients of `x`."""
    if gradient is None:
        if x._layout.numel != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        with _disabled():
            return [torch.ones_like(shard) for shard in (kernels_see(x), *shards_of(x)[1:])]
    if not isinstance(gradient, DTensor) and gradient.dim() == 0 and x._layout.numel == 1:
        with _disabled():
            return [gradient.expand(shard.shape) for shard in shards_of(x)]
    return list(gradient_shards(gradient, x._layout, "the gradient"))


def _plain_seed(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is not None or not x.requires_grad:
        return gradient
    if x.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(x)


def _uses(x: DTensor) -> tuple[Tensor, ...]:
    """The shards as a use of the tensor sees them: before its hooks."""
    if not rendezvous:
        return shards_of(x)
    with torch.enable_grad():
        return shards_of(localise(x))


def _refuse_edge(x: Any) -> None:
    if isinstance(x, GradientEdge):
        raise NotImplementedError(
            "an edge of the graph leads to one rank's shard; give backward and grad the DTensor itself, not its edge"
        )


def _flat(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    for x in tensors:
        _refuse_edge(x)
        if isinstance(x, DTensor):
            observe(x)
    return tuple(shard for x in tensors for shard in (shards_of(x) if isinstance(x, DTensor) else (x,)))


# Hooks


@handles(Tensor.register_post_accumulate_grad_hook)
def _post_accumulate_hook(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hook runs when all ranks held here have their gradient."""
    x, hook = args
    tensor = weakref.ref(x)  # the hook lives on the tensor: a strong reference would keep it for ever
    total = len(shards_of(x))
    arrived = [0]

    def when_complete(_: Tensor) -> None:
        arrived[0] += 1
        if arrived[0] == total:
            arrived[0] = 0
            with _users_code():
                found = hook(tensor())
            if found is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")

    with _disabled():
        handles = [func(shard, when_complete) for shard in shards_of(x)]
    return handles[0] if total == 1 else Handles(handles)


@handles(Tensor.register_hook)
def _register_hook(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hook sees the gradient as a DTensor, and may return another one."""
    x, hook = args
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    observe(x)
    run = partial(_run_hooks, x._layout)
    with _disabled():
        if "_peers" not in x.__dict__:
            x.grad_fn  # noqa: B018  # torch dies of a hook on a view written to since, unless it has brought this up to date
            return func(x, lambda grad: (run((hook,), (grad,)) or (None,))[0])
        shards = shards_of(x)
        return (rendezvous_of(shards) or Rendezvous(shards, run)).add(hook)


def _run_hooks(layout: Layout, hooks: Iterable[Callable], grads: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
    """What hooks put in the place of a gradient. As in torch they are given None where a node runs for the sake of its
    other results."""
    if noters:
        layout = layout.on(captured_mesh(layout.mesh))
    replaced = None
    for hook in hooks:
        with _users_code():
            result = hook(*joined_gradients(grads, [layout]))
        if result is not None:
            grads = replaced = [_no_view(x) for x in gradient_shards(result, layout, "the hook's result")]
    return replaced


def _no_view(grad: Tensor) -> Tensor:
    """What may be differentiated in turn is no view of the hook's result: torch would give it another history once that
    is written to."""
    with _disabled():
        return own_node(grad) if grad.requires_grad else grad
