"""One call on DTensors against the same call on plain tensors: right, refused, raised or wrong; sharded or gathered.

Compared are what it returns (nesting, shapes, dtypes, values, whether gradients flow, and which arguments it is), what
it writes to, that it writes to nothing else, gradients, and that replicas agree. Strides of what it returns are
compared too, but other strides do not make an answer wrong: they are counted. An answer in single precision that is a
little off is right if it is right in double precision: it was rounding.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.debug import CommDebugMode
from shardwise.dispatch.planning import fallback
from shardwise.errors import FallbackWarning, InPlaceError
from shardwise.layout import Mesh, Partial, Placement, Replicate
from shardwise.proof.coverage.reference import Reference, structure
from shardwise.proof.kit.compare import Wrong, check_kind, check_shards, check_value, same, whole
from shardwise.proof.kit.placing import place
from shardwise.proof.kit.samples import flatten, replaced, seeded
from shardwise.tensor import DTensor, distribute_tensor

ROUNDED = "off by rounding: right in double precision"
ROUNDING = 1e-3
"""Of the largest number of a call: how far rounding may bring its answers in single precision."""

Placements = Sequence[Placement]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one call. `way` is how it ran: "sharded", "gathered", or "whole" where no input was sharded."""

    kind: str  # "right", "refused", "raised" or "wrong"
    way: str = "whole"
    detail: str = ""
    strides: str = ""  # of a right answer whose strides are not torch's, in words
    off: float = math.inf  # how far the numbers of a wrong answer are off, if nothing else is wrong with it


def judge(
    case: Reference, mesh: Mesh | Sequence[Mesh], placements: Sequence[Placements | None], *, let_out: bool = False
) -> Verdict:
    """Run a case with its inputs in these placements, on one mesh or each on its own, and compare. Tensors for `out=`
    without placements get those of the results without it. `let_out`: an error is raised, not described."""
    verdict = _judged(case, mesh, placements, let_out)
    if verdict.kind == "wrong" and verdict.off <= ROUNDING * case.scale and case.in_double is not None:
        again = _judged(case.in_double, mesh, placements, let_out)
        return replace(again, detail=ROUNDED) if again.kind == "right" else verdict
    return verdict


def _judged(
    case: Reference, mesh: Mesh | Sequence[Mesh], placements: Sequence[Placements | None], let_out: bool
) -> Verdict:
    tensors = case.sample.tensors
    meshes = [mesh] * len(tensors) if isinstance(mesh, Mesh) else mesh
    placements = _with_those_of_results(case, meshes, placements)
    inputs = [place(x, on, where, case.seed + i) for i, (x, on, where) in enumerate(zip(tensors, meshes, placements))]
    fallback._reported.clear()  # so that each call says that it gathers
    with warnings.catch_warnings(record=True) as told, CommDebugMode() as comms:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", category=FallbackWarning)
        way, stage = "whole", ""
        try:
            with seeded("call", case.seed):
                returned = case.run(inputs)
            outputs = flatten(returned)
            way = _way(told, comms, inputs, outputs)
            _compare_structure(case, returned)
            _compare_outputs(case, inputs, outputs)
            _compare_arguments(case, inputs)
            stage = "backward: "
            _compare_gradients(case, inputs, outputs)
        except Wrong as wrong:
            return Verdict("wrong", way, str(wrong), off=wrong.off)
        except Exception as error:
            if isinstance(error, InPlaceError) and not stage:
                return _refused(case, inputs, error)
            if let_out:
                raise
            return Verdict("raised", way, f"{stage}{_describe(error)}")
        return Verdict("right", way, strides=_other_strides(case, outputs))


def _with_those_of_results(
    case: Reference, meshes: Sequence[Mesh], placements: Sequence[Placements | None]
) -> Sequence[Placements]:
    """Placements for all tensors of a call with `out=`."""
    known = [where for where in placements if where is not None]
    if len(known) == len(placements):
        return known
    first = case.sample.tensors[: len(known)]
    images: dict[int, Any] = {
        id(x): place(x, on, where, case.seed) for x, on, where in zip(first, meshes, known, strict=False)
    }
    kwargs = {name: arg for name, arg in case.sample.kwargs.items() if name != "out"}
    with warnings.catch_warnings(action="ignore"):
        try:
            results = flatten(case.form.function(*replaced(case.sample.args, images), **replaced(kwargs, images)))
        except Exception:  # then it does so as a function as well, and that is told
            results = []
    anywhere = [(Replicate(),) * on.ndim for on in meshes[len(known) :]]
    reduced = [[Replicate() if isinstance(p, Partial) else p for p in x.placements] for x in results]
    return [*known, *(reduced if len(reduced) == len(anywhere) else anywhere)]


def _refused(case: Reference, inputs: Sequence[DTensor], error: InPlaceError) -> Verdict:
    """A write of another shape, for which there may be no layout, may be refused, if nothing was written before."""
    if not (case.form.reshapes or (case.form.in_place and case.reshapes)):
        return Verdict("raised", detail=_describe(error))
    for x, d in zip(case.sample.tensors, inputs, strict=True):
        if not same(whole(d), x.detach()):
            return Verdict("wrong", detail="refused after having written")
    return Verdict("refused", detail=_describe(error))


def _way(told: Sequence[Any], comms: CommDebugMode, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> str:
    """How a call ran. It gathered if it said so, or gathered all of a sharded input and left nothing sharded."""
    if not any(any(x._layout.splits) for x in inputs):
        return "whole"
    if told:
        return "gathered"
    if any(any(x._layout.splits) or x._layout.has_pending for x in outputs if isinstance(x, DTensor)):
        return "sharded"
    with torch._C.DisableTorchFunctionSubclass():
        shards = [x.numel() * x.element_size() for x in inputs if any(x._layout.splits)]
    largest = max((comm.bytes for comm in comms.comms if comm.kind == "all_gather"), default=0)
    return "gathered" if largest > 0 and largest >= min(shards) else "sharded"


# Comparing


def _compare_structure(case: Reference, returned: Any) -> None:
    if structure(returned) != case.structure:
        raise Wrong(f"returns {structure(returned)}, not {case.structure}"[:200])


def _compare_outputs(case: Reference, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> None:
    for i, (mine, expected) in enumerate(zip(outputs, case.outputs, strict=True)):
        name = "value" if len(outputs) == 1 else f"value of output {i}"
        if not isinstance(expected, Tensor):
            if type(mine) is not type(expected) or not (case.random or same(mine, expected)):
                raise Wrong(f"{name}: {mine!r}, not {expected!r}"[:120])
            continue
        for j in case.written:
            if expected is case.leaves[j] and mine is not inputs[j]:
                raise Wrong(f"{name}: is not argument {j}, which it writes to")
        _compare(case, name, mine, expected)
        if mine.requires_grad != expected.requires_grad:
            raise Wrong(f"requires_grad of output {i} is {mine.requires_grad}")


def _compare_arguments(case: Reference, inputs: Sequence[DTensor]) -> None:
    """What torch writes to has the same new value, and nothing else was written to."""
    for i, (mine, expected) in enumerate(zip(inputs, case.leaves, strict=True)):
        if i in case.written:
            _compare(case, f"argument {i}, which it writes to", mine, expected)
        elif not same(whole(mine), expected.detach()):
            raise Wrong(f"argument {i}: was written to, which torch does not do")
        if mine.requires_grad != expected.requires_grad:
            raise Wrong(f"requires_grad of argument {i} is {mine.requires_grad}")


def _compare_gradients(case: Reference, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> None:
    if case.gradients is None:
        return
    pairs = [(x, w) for x, w in zip(outputs, case.weights, strict=True) if w is not None]
    torch.autograd.backward([x for x, _ in pairs], [distribute_tensor(w, x.device_mesh).to(x.device) for x, w in pairs])
    for i, (x, expected) in enumerate(zip(inputs, case.gradients, strict=True)):
        if expected is None:
            if x.grad is not None and whole(x.grad).any():
                raise Wrong(f"gradient of input {i}: should be none")
        elif x.grad is None:
            raise Wrong(f"gradient of input {i}: none")
        else:
            _compare(case, f"gradient of input {i}", x.grad, expected)


def _compare(case: Reference, name: str, mine: Any, expected: Tensor) -> None:
    check_kind(name, mine, expected)
    check_shards(name, mine, replicas=not case.valueless)
    if not case.random:
        check_value(name, mine, expected)


def _other_strides(case: Reference, outputs: Sequence[Any]) -> str:
    """The strides of the first result that has others than torch's, if there is one."""
    for mine, expected in zip(outputs, case.outputs, strict=True):
        if isinstance(mine, DTensor) and not same_strides(expected.shape, mine.stride(), expected.stride()):
            return f"{list(mine.stride())}, not {list(expected.stride())}, as {mine._layout}"
    return ""


def same_strides(shape: Sequence[int], mine: Sequence[int], expected: Sequence[int]) -> bool:
    """Of no elements, and of dims with one index, strides say nothing."""
    return 0 in shape or all(a == b for size, a, b in zip(shape, mine, expected, strict=True) if size > 1)


def _describe(error: BaseException) -> str:
    """An error in one line, with the place in this package that it came through last."""
    package = Path(__file__).resolve().parents[2]
    places = [
        f"{file.relative_to(package).as_posix()}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if package in (file := Path(frame.filename)).parents and package / "proof" not in file.parents
    ]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}" + (f" [{places[-1]}]" if places else "")
