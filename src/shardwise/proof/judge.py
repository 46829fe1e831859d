"""One call on DTensors against the same call on plain tensors: right, refused, raised or wrong; sharded or gathered."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.debug import CommDebugMode
from shardwise.dispatch import fallback
from shardwise.errors import FallbackWarning, InPlaceError
from shardwise.layout import Layout, Mesh, Partial, Placement, Replicate
from shardwise.proof.distance import allowed, apart, distance, equal, largest, same
from shardwise.proof.forms import Form, Unusable
from shardwise.proof.placing import place
from shardwise.proof.rounding import DOUBLE, Answer, Spread, doubled, spread_of
from shardwise.proof.samples import SPARSE, Sample, counting_draws, flatten, replaced, seeded, tensors_in
from shardwise.tensor import DTensor, distribute_tensor

Placements = Sequence[Placement]

_disabled = torch._C.DisableTorchFunctionSubclass


class Wrong(Exception):
    """An answer that is not the single-device answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one call. `way` is how it ran: "sharded", "gathered", or "whole" where no input was sharded."""

    kind: str  # "right", "refused", "raised" or "wrong"
    way: str = "whole"
    detail: str = ""
    avoidable: bool = False  # it gathered, though the shards as they lie would have given shards of the answer


class Case:
    """One sample of one form of an operator, with plain torch's results and gradients."""

    def __init__(
        self, form: Form, sample: Sample, *, valueless: bool = False, may_write: bool = False, seed: int = 0
    ) -> None:
        sample = form.sample(sample)
        self.form, self.sample, self.seed = form, sample, seed
        if any(_unshardable(x) for x in sample.tensors):
            raise Unusable(SPARSE)
        if form.in_place and (sample.broadcasts or not isinstance(sample.args[0], (Tensor, list))):
            raise Unusable("has no in-place form")
        self.leaves = [_leaf(x) for x in sample.tensors]
        versions = [x._version for x in self.leaves]
        returned = self._try(self.leaves)
        self.outputs, self.structure = flatten(returned), structure(returned)
        if any(isinstance(x, Tensor) and _unshardable(x) for x in self.outputs):
            raise Unusable(SPARSE)
        if form.has_out and not self._is_written():
            raise Unusable("torch itself does not write to out=")
        self.written = [i for i, (x, y) in enumerate(zip(sample.tensors, self.leaves)) if not same(x, y)]
        bumped = [x._version != version for x, version in zip(self.leaves, versions, strict=True)]
        self.may_refuse = form.in_place or may_write or bool(self.written) or any(bumped)
        self.valueless = valueless
        self.random = valueless or self._draws()
        self.weights = self._weights()
        self.gradients = self._gradients()

    def run(self, images: Sequence[Tensor], sample: Sample | None = None) -> Any:
        """What the call returns, or wrote to, with other tensors in place of the sample's (or those of another)."""
        sample = sample or self.sample
        by_id = {id(x): image for x, image in zip(sample.tensors, images, strict=True)}
        args, kwargs = replaced(sample.args, by_id), replaced(sample.kwargs, by_id)
        if not self.form.in_place:
            return self.form.function(*args, **kwargs)
        given = tensors_in(args[0])
        targets = [x.clone() for x in given]
        try:
            self.form.function(targets if isinstance(args[0], list) else targets[0], *args[1:], **kwargs)
        except InPlaceError:
            if not all(same(_whole(x), _whole(y)) for x, y in zip(targets, given, strict=True)):
                raise Wrong("refused after having written") from None
            raise
        return targets

    def _is_written(self) -> bool:
        """Whether the results of a call with `out=` are those without it."""
        given = {name: arg for name, arg in self.sample.kwargs.items() if name != "out"}
        outs = tensors_in(self.sample.kwargs["out"])
        with seeded("call", self.seed):
            others = [_leaf(x) for x in self.sample.tensors[: -len(outs)]]
            results = flatten(self.run(others, replace(self.sample, kwargs=given)))
        written = self.leaves[-len(outs) :]
        return all(x.shape == y.shape and distance(x, y) is None for x, y in zip(written, results, strict=True))

    def _try(self, images: Sequence[Tensor]) -> Any:
        try:
            with seeded("call", self.seed):
                return self.run(images)
        except Exception as error:
            raise Unusable("torch refuses it") from error

    def _draws(self) -> bool:
        with seeded("call", self.seed), counting_draws() as drawn:
            self.run([_leaf(x) for x in self.sample.tensors])
            return drawn()

    def _weights(self) -> list[Tensor | None]:
        with seeded("weights", self.seed):
            return [torch.randn_like(x.detach()) if _differentiable(x) else None for x in self.outputs]

    def _gradients(self) -> list[Tensor | None] | None:
        """Gradients of the leaves, or None where torch has none."""
        pairs = [(x, w) for x, w in zip(self.outputs, self.weights, strict=True) if w is not None]
        if not pairs:
            return None
        try:
            torch.autograd.backward([x for x, _ in pairs], [w for _, w in pairs])
        except Exception:  # torch itself has no gradient here
            return None
        return [x.grad for x in self.leaves]

    @cached_property
    def spread(self) -> Spread | None:
        """How far rounding brings the outputs, the leaves and the gradients apart, in this order; None if that cannot
        be told. Found out only when it matters."""
        images: dict[int, Tensor] = {}
        sample = replace(
            self.sample, args=doubled(self.sample.args, images), kwargs=doubled(self.sample.kwargs, images)
        )
        weights = [None if w is None else w.to(DOUBLE.get(w.dtype, w.dtype)) for w in self.weights]

        def run() -> Answer:
            leaves = [_leaf(x) for x in sample.tensors]
            with seeded("call", self.seed):
                outputs = flatten(self.run(leaves, sample))
            pairs = [(x, w) for x, w in zip(outputs, weights, strict=True) if w is not None]
            if self.gradients is not None:
                torch.autograd.backward([x for x, _ in pairs], [w for _, w in pairs])
            found = [*outputs, *leaves, *(x.grad for x in leaves)]
            return [x.detach() if isinstance(x, Tensor) and x.dtype in DOUBLE.values() else None for x in found]

        return spread_of(run)


def structure(tree: Any) -> str:
    """How what a call returned is nested, in words: `tuple[_, _]`."""
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}[{', '.join(map(structure, tree))}]"
    return f"dict[{', '.join(map(structure, tree.values()))}]" if isinstance(tree, dict) else "_"


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _unshardable(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_quantized


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


# Judging


def judge(
    case: Case, mesh: Mesh | Sequence[Mesh], placements: Sequence[Placements | None], *, let_out: bool = False
) -> Verdict:
    """Run a case with its inputs laid out so, on one mesh or each on its own, and compare. Tensors for `out=` without
    placements lie as the results without it do. `let_out`: an error is raised, not described."""
    tensors = case.sample.tensors
    meshes = [mesh] * len(tensors) if isinstance(mesh, Mesh) else mesh
    placements = _with_those_of_results(case, meshes, placements)
    inputs = [place(x, on, where, case.seed + i) for i, (x, on, where) in enumerate(zip(tensors, meshes, placements))]
    sharded = any(any(x._layout.splits) for x in inputs)
    fallback._told.clear()  # so that each call says that it gathers
    with warnings.catch_warnings(record=True) as told, CommDebugMode() as comms:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", category=FallbackWarning)
        try:
            with seeded("call", case.seed):
                returned = case.run(inputs)
                outputs = flatten(returned)
        except InPlaceError as error:
            return _refused(case, inputs, error)
        except Wrong as wrong:
            return Verdict("wrong", detail=str(wrong))
        except Exception as error:
            if let_out:
                raise
            return Verdict("raised", detail=_describe(error))
        way = "whole"
        if sharded:
            way = "gathered" if _gathers(told, comms, inputs, outputs) else "sharded"
        try:
            if structure(returned) != case.structure:
                raise Wrong(f"returns {structure(returned)}, not {case.structure}"[:200])
            _compare_outputs(case, inputs, outputs)
            _compare_gradients(case, inputs, outputs)
        except Wrong as wrong:
            return Verdict("wrong", way, str(wrong))
        except Exception as error:
            if let_out:
                raise
            return Verdict("raised", way, f"backward: {_describe(error)}")
        asked = case.form.has_out  # where `out=` lies is the user's wish
        return Verdict("right", way, avoidable=way == "gathered" and not asked and shards_give_shards(case, inputs))


def _with_those_of_results(
    case: Case, meshes: Sequence[Mesh], placements: Sequence[Placements | None]
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = flatten(case.form.function(*replaced(case.sample.args, images), **replaced(kwargs, images)))
        except Exception:  # then it does so as a function as well, and that is told
            results = []
    whole = [(Replicate(),) * on.ndim for on in meshes[len(known) :]]
    laid = [_without_pending(x.placements) for x in results]
    return [*known, *(laid if len(laid) == len(whole) else whole)]


def _without_pending(placements: Placements) -> Placements:
    return [Replicate() if isinstance(p, Partial) else p for p in placements]


def _refused(case: Case, inputs: Sequence[DTensor], error: InPlaceError) -> Verdict:
    if not case.may_refuse:
        return Verdict("raised", detail=_describe(error))
    for x, d in zip(case.sample.tensors, inputs, strict=True):
        if not same(_whole(d), x.detach()):
            return Verdict("wrong", detail="refused after having written")
    return Verdict("refused", detail=_describe(error))


def _gathers(told: Sequence[Any], comms: CommDebugMode, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> bool:
    """Whether a call said so, or gathered all of a sharded input and left nothing sharded."""
    if told:
        return True
    if any(any(x._layout.splits) or x._layout.has_pending for x in outputs if isinstance(x, DTensor)):
        return False
    with _disabled():
        shards = [x.numel() * x.element_size() for x in inputs if any(x._layout.splits)]
    largest = max((comm.bytes for comm in comms.comms if comm.kind == "all_gather"), default=0)
    return largest > 0 and largest >= min(shards)


def _compare_outputs(case: Case, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> None:
    for i, (mine, expected) in enumerate(zip(outputs, case.outputs, strict=True)):
        name = "value" if len(outputs) == 1 else f"value of output {i}"
        if not isinstance(expected, Tensor):
            if isinstance(mine, Tensor) or not (case.random or equal(mine, expected)):
                raise Wrong(f"{name}: {mine!r}, not {expected!r}"[:120])
            continue
        for j in case.written:
            if expected is case.leaves[j] and mine is not inputs[j]:
                raise Wrong(f"{name}: is not argument {j}, which it writes to")
        _compare(case, name, mine, expected, i)
        if mine.requires_grad != expected.requires_grad:
            raise Wrong(f"requires_grad of output {i} is {mine.requires_grad}")
    for i in case.written:
        _compare(case, f"argument {i}, which it writes to", inputs[i], case.leaves[i], len(outputs) + i)


def _compare_gradients(case: Case, inputs: Sequence[DTensor], outputs: Sequence[Any]) -> None:
    if case.gradients is None:
        return
    pairs = [(x, w) for x, w in zip(outputs, case.weights, strict=True) if w is not None]
    torch.autograd.backward([x for x, _ in pairs], [distribute_tensor(w, x.device_mesh) for x, w in pairs])
    for i, (x, expected) in enumerate(zip(inputs, case.gradients, strict=True)):
        if expected is None:
            if x.grad is not None and _whole(x.grad).any():
                raise Wrong(f"gradient of input {i}: should be none")
        elif x.grad is None:
            raise Wrong(f"gradient of input {i}: none")
        else:
            _compare(case, f"gradient of input {i}", x.grad, expected, len(outputs) + len(inputs) + i)


def _compare(case: Case, name: str, mine: Any, expected: Tensor, position: int) -> None:
    """Compare one tensor, which stands at `position` in the whole answer of the case."""
    if not isinstance(mine, DTensor):
        raise Wrong(f"{name}: a {type(mine).__name__}, not a DTensor")
    if mine.shape != expected.shape:
        raise Wrong(f"{name}: shape {list(mine.shape)}, not {list(expected.shape)}")
    if mine.dtype != expected.dtype:
        raise Wrong(f"{name}: dtype {mine.dtype}, not {expected.dtype}")
    _check_shards(name, mine, with_values=not case.valueless)
    if case.random:
        return
    whole, expected = _whole(mine), expected.detach()
    if same(whole, expected) or (off := distance(whole, expected)) is None:
        return
    if not _is_rounding(case, position, whole, expected):
        raise Wrong(f"{name}: off by {off:.2g} (largest: {largest(expected):.2g}) as {mine._layout}")


def _check_shards(name: str, x: DTensor, *, with_values: bool) -> None:
    """Every shard has the shape its layout says, and ranks that must agree do."""
    layout, shards = x._layout, shards_of(x)
    with _disabled():
        shapes = [tuple(torch._C.TensorBase.size(shard)) for shard in shards]
        if shapes != list(layout.held_shapes):
            raise Wrong(f"{name}: shards of shapes {shapes} do not fit {layout}")
        if not with_values:
            return
        seen: dict[Any, Tensor] = {}
        for coordinate, shard in zip(layout.mesh.held, shards, strict=True):
            shard = shard.detach().as_subclass(Tensor)
            key = (layout.box(coordinate), tuple(c for c, p in zip(coordinate, layout.pending, strict=True) if p))
            other = seen.setdefault(key, shard)
            if not same(other, shard) and distance(other, shard) is not None:
                raise Wrong(f"{name}: replicas differ as {layout}")


def _whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.detach()
    with torch.no_grad():
        return x.detach().full_tensor()


def _is_rounding(case: Case, position: int, mine: Tensor, expected: Tensor) -> bool:
    """Whether two answers in single precision that differ are both as near to the one in double precision as rounding
    brings this call."""
    if expected.dtype not in DOUBLE or case.spread is None:
        return False
    truth, reach = case.spread.truth[position], case.spread.reach[position]
    if truth is None or reach is None or truth.shape != expected.shape:
        return False
    limit = torch.maximum(allowed(expected), reach)
    return all(bool((apart(x, truth) <= limit).all()) for x in (mine, expected))


def _describe(error: BaseException) -> str:
    """An error in one line, with the place in this package that it came through last."""
    package = Path(__file__).resolve().parents[1]
    places = [
        f"{file.parent.name}/{file.name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if package in (file := Path(frame.filename)).parents and file.parent.name != "proof"
    ]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}" + (f" [{places[-1]}]" if places else "")


# Would the shards do?


def shards_give_shards(case: Case, inputs: Sequence[DTensor]) -> bool:
    """Whether the call on each rank's shards, as they lie, gives shards of the whole answer: the sharded dims are of
    the nature of a batch, and gathering them was not needed. Known for one axis without pending sums only."""
    layouts: list[Layout] = [x._layout for x in inputs]
    if not case.form.checks_sizes or layouts[0].mesh.ndim > 1 or any(layout.has_pending for layout in layouts):
        return False
    if not all(all(shape) for layout in layouts for shape in layout.held_shapes):
        return False  # a rank without elements proves nothing
    try:
        parts = []
        for rank in range(len(layouts[0].mesh.held)):
            with _disabled():
                shards = [shards_of(x)[rank].detach().as_subclass(Tensor).clone() for x in inputs]
            with seeded("call", case.seed), torch.no_grad():
                parts.append(flatten(case.run(shards)))
    except Exception:  # it takes sizes, or cannot run on such shards
        return False
    return all(_joins(expected, list(column)) for expected, *column in zip(case.outputs, *parts, strict=True))


def _joins(expected: Any, parts: Sequence[Any]) -> bool:
    """Whether parts make up the whole along some dim."""
    if not isinstance(expected, Tensor) or not tensors_in(list(parts)):
        return False
    for dim in range(expected.dim()):
        try:
            whole = torch.cat(list(parts), dim)
        except (RuntimeError, IndexError):
            continue
        if whole.shape == expected.shape and whole.dtype == expected.dtype:
            if distance(whole, expected.detach()) is None:
                return True
    return False
