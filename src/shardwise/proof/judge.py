"""One call on DTensors against the same call on plain tensors: right, refused, raised or wrong; sharded or gathered."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.debug import CommDebugMode
from shardwise.dispatch import fallback
from shardwise.errors import FallbackWarning, InPlaceError
from shardwise.layout import Layout, Mesh, Placement
from shardwise.proof.placing import place
from shardwise.proof.samples import SPARSE, Sample, counting_draws, replaced, seeded, tensors_in
from shardwise.tensor import DTensor, distribute_tensor

Placements = Sequence[Placement]

_disabled = torch._C.DisableTorchFunctionSubclass


class Unusable(Exception):
    """Plain torch does not give a sample an answer to compare with."""


class Wrong(Exception):
    """An answer that is not the single-device answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one call. `way` is how it ran: "sharded", "gathered", or "whole" where no input was sharded."""

    kind: str  # "right", "refused", "raised" or "wrong"
    way: str = "whole"
    detail: str = ""
    avoidable: bool = False  # it gathered, though the shards as they lie would have given shards of the answer


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write an operator: as a function, as a method, or in place."""

    name: str
    function: Callable
    in_place: bool = False
    checks_sizes: bool = True  # it can be tried on arguments whose sizes may not fit


def flatten(tree: Any) -> list[Any]:
    """What a call returned, as a flat list of tensors and other values."""
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flatten(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flatten(item)]
    return [tree]


class Case:
    """One sample of one form of an operator, with plain torch's results and gradients."""

    def __init__(
        self, form: Form, sample: Sample, *, valueless: bool = False, may_write: bool = False, seed: int = 0
    ) -> None:
        self.form, self.sample, self.seed = form, sample, seed
        if any(_unshardable(x) for x in sample.tensors):
            raise Unusable(SPARSE)
        if form.in_place and (sample.broadcasts or not isinstance(sample.args[0], Tensor)):
            raise Unusable("has no in-place form")
        self.leaves = [_leaf(x) for x in sample.tensors]
        versions = [x._version for x in self.leaves]
        self.outputs = self._try(self.leaves)
        if any(isinstance(x, Tensor) and _unshardable(x) for x in self.outputs):
            raise Unusable(SPARSE)
        self.written = [i for i, (x, y) in enumerate(zip(sample.tensors, self.leaves)) if not _same(x, y)]
        bumped = [x._version != version for x, version in zip(self.leaves, versions, strict=True)]
        self.may_refuse = form.in_place or may_write or bool(self.written) or any(bumped)
        self.valueless = valueless
        self.random = valueless or self._draws()
        self.weights = self._weights()
        self.gradients = self._gradients()

    def run(self, images: Sequence[Tensor]) -> list[Any]:
        """The call with other tensors in place of the sample's."""
        by_id = {id(x): image for x, image in zip(self.sample.tensors, images, strict=True)}
        args, kwargs = replaced(self.sample.args, by_id), replaced(self.sample.kwargs, by_id)
        if not self.form.in_place:
            return flatten(self.form.function(*args, **kwargs))
        target = args[0].clone()
        try:
            self.form.function(target, *args[1:], **kwargs)
        except InPlaceError:
            if not _same(_whole(target), _whole(args[0])):
                raise Wrong("refused after having written") from None
            raise
        return [target]

    def _try(self, images: Sequence[Tensor]) -> list[Any]:
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


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _unshardable(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_quantized


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


# Judging


def judge(case: Case, mesh: Mesh, placements: Sequence[Placements], *, let_out: bool = False) -> Verdict:
    """Run a case with its inputs laid out so, and compare. `let_out`: an error is raised, not described."""
    inputs = [place(x, mesh, where, case.seed + i) for i, (x, where) in enumerate(zip(case.sample.tensors, placements))]
    sharded = any(any(x._layout.splits) for x in inputs)
    fallback._told.clear()  # so that each call says that it gathers
    with warnings.catch_warnings(record=True) as told, CommDebugMode() as comms:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", category=FallbackWarning)
        try:
            with seeded("call", case.seed):
                outputs = case.run(inputs)
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
            _compare_outputs(case, inputs, outputs)
            _compare_gradients(case, inputs, outputs, mesh)
        except Wrong as wrong:
            return Verdict("wrong", way, str(wrong))
        except Exception as error:
            if let_out:
                raise
            return Verdict("raised", way, f"backward: {_describe(error)}")
        return Verdict("right", way, avoidable=way == "gathered" and shards_give_shards(case, inputs))


def _refused(case: Case, inputs: Sequence[DTensor], error: InPlaceError) -> Verdict:
    if not case.may_refuse:
        return Verdict("raised", detail=_describe(error))
    for x, d in zip(case.sample.tensors, inputs, strict=True):
        if not _same(_whole(d), x.detach()):
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
    if len(outputs) != len(case.outputs):
        raise Wrong(f"returns {len(outputs)} values, not {len(case.outputs)}")
    for i, (mine, expected) in enumerate(zip(outputs, case.outputs, strict=True)):
        name = "value" if len(outputs) == 1 else f"value of output {i}"
        if not isinstance(expected, Tensor):
            if isinstance(mine, Tensor) or not (case.random or _equal(mine, expected)):
                raise Wrong(f"{name}: {mine!r}, not {expected!r}"[:120])
            continue
        _compare(case, name, mine, expected)
        if mine.requires_grad != expected.requires_grad:
            raise Wrong(f"requires_grad of output {i} is {mine.requires_grad}")
    for i in case.written:
        _compare(case, f"argument {i}, which it writes to", inputs[i], case.leaves[i])


def _compare_gradients(case: Case, inputs: Sequence[DTensor], outputs: Sequence[Any], mesh: Mesh) -> None:
    if case.gradients is None:
        return
    pairs = [(x, w) for x, w in zip(outputs, case.weights, strict=True) if w is not None]
    torch.autograd.backward([x for x, _ in pairs], [distribute_tensor(w, mesh) for _, w in pairs])
    for i, (x, expected) in enumerate(zip(inputs, case.gradients, strict=True)):
        if expected is None:
            if x.grad is not None and _whole(x.grad).any():
                raise Wrong(f"gradient of input {i}: should be none")
        elif x.grad is None:
            raise Wrong(f"gradient of input {i}: none")
        else:
            _compare(case, f"gradient of input {i}", x.grad, expected)


def _compare(case: Case, name: str, mine: Any, expected: Tensor) -> None:
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
    if not _same(whole, expected) and (off := _distance(whole, expected)) is not None:
        raise Wrong(f"{name}: off by {off:.2g} (largest: {_largest(expected):.2g}) as {mine._layout}")


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
            if not _same(other, shard) and _distance(other, shard) is not None:
                raise Wrong(f"{name}: replicas differ as {layout}")


def _whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.detach()
    with torch.no_grad():
        return x.detach().full_tensor()


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values are the same, bit by bit but for NaNs."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return _equal(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = _plain(a), _plain(b)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _plain(x: Tensor) -> Tensor:
    """Without history and lazy bits, in a dtype that can be compared."""
    x = x.detach().resolve_conj().resolve_neg()
    return x.to(torch.complex64) if x.dtype == torch.complex32 else x


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)
    except (RuntimeError, ValueError):
        return False


TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-4, torch.complex64: 2e-4}
"""How far results may be apart, of their own size and of the largest among them; other floats: 1e-2, the rest: 0."""

NOISE = 1e-4
"""Of the tolerance: how large a number may be whose true value is zero."""


def _distance(a: Tensor, b: Tensor) -> float | None:
    """How far two tensors of one shape and dtype are apart; None if no farther than rounding may bring them."""
    inexact = b.is_floating_point() or b.is_complex()
    tolerance = TOLERANCE.get(b.dtype, 1e-2) if inexact else 0.0
    a, b = (_plain(x).to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    far = (a - b).abs()
    far[(a == b) | ((a != a) & (b != b))] = 0.0
    far.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    allowed = tolerance * (torch.nan_to_num(b.abs(), posinf=0.0) + _largest(b) + NOISE)
    return None if bool((far <= allowed).all()) else float(far.max())


def _largest(x: Tensor) -> float:
    x = _plain(x)
    size = x.abs() if x.is_floating_point() or x.is_complex() else x.to(torch.float64).abs()
    size = size[torch.isfinite(size)]
    return float(size.max()) if size.numel() else 0.0


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
                parts.append(case.run(shards))
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
            if _distance(whole, expected.detach()) is None:
                return True
    return False
