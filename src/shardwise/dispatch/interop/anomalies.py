"""`detect_anomaly` looks for NaNs after every step of a backward pass, and raises. A rank that did so alone would leave
the others waiting for it: all look on to the end of the pass, and then all of them raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward

from shardwise.comm import noters
from shardwise.dispatch.interop.nodes import nodes_of
from shardwise.layout import Mesh
from shardwise.redistribute import below

_disabled = torch._C.DisableTorchFunctionSubclass
dispatch_modes = torch._C._len_torch_dispatch_stack


def run_backward(meshes: Sequence[Mesh], roots: Sequence[Tensor], *args: Any, **options: Any) -> Any:
    """A backward pass from roots on these meshes. A dispatch mode of the user's sees what the engine computes with:
    where it passes that on, a DTensor is the shard that it is to the engine."""
    if dispatch_modes() and not noters and torch._C._is_torch_function_enabled():
        with _disabled():
            return run_backward(meshes, roots, *args, **options)
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return _engine_run_backward(roots, *args, **options)
    found: list[tuple[Node, int]] = []
    hooks = [node.register_hook(_looking(node, found)) for node in below(nodes_of(roots))]
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            out = _engine_run_backward(roots, *args, **options)
    finally:
        for hook in hooks:
            hook.remove()
    with _disabled(), torch.no_grad():
        somewhere = [anywhere(mesh, [bool(found)] * len(mesh.held)) for mesh in meshes]
    if found:
        node, position = found[0]
        lines = "".join(node.metadata.get("traceback_", []))  # type: ignore[attr-defined]
        warnings.warn(
            f"Error detected in {node.name()}. Traceback of forward call that caused the error:\n{lines}", stacklevel=4
        )
        raise RuntimeError(f"Function '{node.name()}' returned nan values in its {position}th output.")
    if any(somewhere):
        raise RuntimeError("a function returned nan values on another rank, which says which one")
    return out


def anywhere(mesh: Mesh, held: Sequence[bool]) -> bool:
    """Whether something holds for any rank."""
    flags = [torch.tensor(int(flag), device=mesh.device_type) for flag in held]
    found = mesh.port.all_reduce(flags, mesh, tuple(range(mesh.ndim)), "max")[0]
    return any(held) if found.is_meta else bool(found)


def _looking(node: Node, found: list[tuple[Node, int]]) -> Callable[[Any, Any], None]:
    def look(gave: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> None:
        with _disabled():
            for position, grad in enumerate(gave):
                if not found and grad is not None and bool(grad.isnan().any()):
                    found.append((node, position))

    return look
