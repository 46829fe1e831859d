"""What a saved program depends on, in words: the same words are made of where it is to run, and compared one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.guards.guards import MODES, Guards
from shardwise.graph.guards.kinds import kind_of, said
from shardwise.layout import Mesh
from shardwise.words import short_dtype

_disabled = torch._C.DisableTorchFunctionSubclass

Needs = dict[str, str]
"""By what it is called, what something must be like."""


def needs_of(guards: Guards, objects: Mapping[str, Tensor]) -> Needs:
    """What a program with these guards depends on, that reaches these tensors."""
    found = {name: tensor_said(x) for name, x in objects.items()}
    for name, x in objects.items():
        if others := guards.names.all_of(x)[1:]:
            found[f"other names of {name}"] = ", ".join(others)
    found["the arguments"] = str(guards.spec)
    for number, kind in enumerate(guards.kinds.of):
        found[guards.names.leaf(number)] = argument_said(kind)
    found |= {name: repr(value) for name, value in zip(MODES, guards.modes, strict=True)}
    found |= {x.name: repr(x.value) for x in (*guards.plain, *guards.training)}
    found |= {x.name: function_said(x.value) for x in guards.functions}
    found["the functions"] = code_digest(guards.codes)
    return found


def function_said(function: Any) -> str:
    """A function of a library's."""
    known: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(known, '__module__', None)}.{known.__qualname__}"


def tensor_said(x: Tensor) -> str:
    """All of a tensor but its data."""
    with _disabled():
        return argument_said(kind_of(x))


def argument_said(kind: Any) -> str:
    if not isinstance(kind, tuple) or len(kind) < 3:
        return said(kind)
    cls, layout, own, dtype, device, requires_grad, _ = kind
    shape = f"[{','.join(map(str, own[0][0]))}]" if layout is None else f"{layout} on {mesh_said(layout.mesh.root)}"
    strides = " and ".join(dict.fromkeys(str(list(strides)) for _, strides in own))
    gradient = ", with a gradient" if requires_grad else ""
    return f"{cls.__name__} {short_dtype(dtype)}{shape}, {device.type}, strides {strides}{gradient}"


def mesh_said(mesh: Mesh) -> str:
    """The axes of a mesh, and which of its ranks are held here."""
    axes = " × ".join(f"{name}={extent}" for name, extent in zip(mesh.names, mesh.shape, strict=True))
    held = f"rank {mesh.get_rank()}" if len(mesh.held) == 1 else f"{len(mesh.held)} ranks in one process"
    return f"({axes}: {held})"


def difference(saved: Needs, here: Needs) -> str | None:
    """The first thing that is not as it was when the program was saved."""
    for name, was in saved.items():
        now = here.get(name)
        if now is None:
            return f"{name} was {was}, and is not there now"
        if now != was:
            return f"{name} was {was}, and is {now} now" if name != "the functions" else CODE
    new = [name for name in here if name not in saved]
    return f"{new[0]} is {here[new[0]]} now, and was not there" if new else None


CODE = "the code of the function, or of one that it calls, is another one than that which was captured"


def code_digest(codes: Sequence[CodeType]) -> str:
    """What functions do, wherever they stand in a file. Interpreters of other versions compile them otherwise."""
    digest = hashlib.sha256()
    for code in codes:
        for part in _parts(code):
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
        else:
            value: Any = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
            yield repr(value).encode()
