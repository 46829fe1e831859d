"""Running a program on one device and on DTensors, and comparing them after every line.

Compared are the values of what a line gives and of what it writes to; after a backward pass all gradients, and which of
them are None; at the end all values once more, since a write may reach what it must not. Besides, ranks that hold the
same piece must hold the same bits, and all ranks' shards must show the same strides of the whole: whether a call makes
a view follows from them.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shardwise.comm import as_mesh
from shardwise.dispatch import clear_cache
from shardwise.dispatch.aliasing.copied_views import StaleView
from shardwise.dispatch.aliasing.global_strides import inferred_strides
from shardwise.layout import Mesh
from shardwise.proof.fuzz.program import Part, Program, Run
from shardwise.proof.kit.compare import Wrong, check_kind, check_value, pieces, whole
from shardwise.proof.kit.together import RanksApart, line, ranks_compared
from shardwise.tensor import DTensor

RIGHT, WRONG, RAISED, APART, HUNG, INVALID = "right", "wrong", "raised", "apart", "hung", "invalid"
KINDS: dict[str, str] = {
    RIGHT: "values, gradients and replicas are those of one device",
    RAISED: "raised where torch does not, before anything was written",
    WRONG: "a value or a gradient is wrong, or replicas differ",
    APART: "some ranks raise and others do not: as processes they would hang",
    HUNG: "no answer within the time limit",
}
"""What may become of a program."""
FAILURES = (WRONG, APART, HUNG)

Print = tuple[str, Any, int]
"""Of a piece of a value: what it is, which piece, and a number for its bits. Equal pieces have equal numbers."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program, at which of its parts."""

    kind: str
    detail: str = ""
    at: int = -1
    prints: list[Print] = field(default_factory=list, compare=False, repr=False)


def head(detail: str) -> str:
    """What is the same for failures of one class: the detail without names and numbers."""
    return re.sub(r"\b[xvo]?\d+(\.\d+)?(e[-+]?\d+)?\b", "#", detail)[:100]


def judge(program: Program, mesh: Any, tell: Callable[[int], None] = lambda at: None) -> Verdict:
    """Run a program on a mesh twice, with fresh plans and with those that are then known, and `tell` which part it is
    at. What is off by rounding alone, in single precision, is right."""
    with warnings.catch_warnings(action="ignore"), ranks_compared():
        verdict = _twice(program, as_mesh(mesh), tell)
        if verdict.kind == WRONG and program.has_single_precision:
            again = _twice(program.in_double_precision(), as_mesh(mesh), tell)
            return again if again.kind == RIGHT else verdict
    return verdict


def _twice(program: Program, mesh: Mesh, tell: Callable[[int], None]) -> Verdict:
    clear_cache()
    first = _Judged(program, mesh).verdict(tell)
    if first.kind != RIGHT:
        return first
    again = _Judged(program, mesh).verdict(tell)
    if again.kind == RIGHT:
        return replace(first, prints=first.prints + [(f"{what} again", *rest) for what, *rest in again.prints])
    return replace(again, detail=f"run again: {again.detail}")


class _Judged:
    """A program that is being judged."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program = program
        self.plain, self.dist = Run(), Run(mesh)
        self.names: list[str] = []
        self.prints: list[Print] = []
        self.compared = 0
        self.second_order = False
        self.writes = False

    def verdict(self, tell: Callable[[int], None]) -> Verdict:
        for at, part in enumerate(self.program.parts):
            tell(at)
            try:
                self._step(part)
            except Wrong as wrong:
                return Verdict(WRONG, str(wrong), at)
            except _Ended as ended:
                return Verdict(ended.kind, str(ended), at)
        try:
            self._compare_all("at the end")
        except Wrong as wrong:
            return Verdict(WRONG, str(wrong), len(self.program.parts))
        return Verdict(RIGHT, prints=self.prints)

    def _step(self, part: Part) -> None:
        try:
            self.dist.do(part)
        except RanksApart as error:
            raise _Ended(APART, str(error)) from error
        except Exception as error:
            told = line(error)
            self._compare_all(f"after {told}")  # or it was written to before
            self._plainly(part)
            raise _Ended(RAISED, told) from error
        versions = {name: x._version for name, x in self.plain.tensors(self.names)}
        self._plainly(part)
        self.second_order |= "create_graph" in part.text
        self.names += part.gives
        written = [name for name, x in self.plain.tensors(list(versions)) if x._version != versions[name]]
        self.writes |= bool(written) or "_(" in part.text or ".data" in part.text
        for name in (*part.gives, *written):
            self._compare(name, self.dist.value(name), self.plain.value(name))
        if "backward" in part.text or "grad_norm_" in part.text or ".step()" in part.text:
            self._compare_gradients()

    def _plainly(self, part: Part) -> None:
        try:
            self.plain.do(part)
        except Exception as error:
            raise _Ended(INVALID, line(error)) from error

    # Comparing

    def _compare_all(self, when: str) -> None:
        if not self.writes:
            return
        for name in self.names:
            self._compare(name, self.dist.value(name), self.plain.value(name), f" {when}")

    def _compare_gradients(self) -> None:
        for name, expected in self.plain.tensors(self.names):
            if expected.is_leaf or expected.retains_grad:
                mine = self.dist.value(name)
                self._compare(f"{name}.grad", mine.grad, expected.grad)
                if expected.grad is None and mine.grad is not None:
                    mine.grad = None  # excused: what an optimizer makes of it is no other matter

    def _compare(self, name: str, mine: Any, expected: Any, when: str = "") -> None:
        if not isinstance(expected, Tensor):
            if expected is None and mine is not None and not (isinstance(mine, Tensor) and self._excused(mine)):
                raise Wrong(f"{name}{when}: should be None")
            return
        if isinstance(mine, StaleView) and not when:
            return  # looked at, it would be taken again: at the end
        check_kind(f"{name}{when}", mine, expected)
        if mine.requires_grad != expected.requires_grad and not self.second_order:  # which formulas decide there
            raise Wrong(f"{name}{when}: requires_grad is {mine.requires_grad}")
        self._compare_pieces(f"{name}{when}", mine)
        check_value(f"{name}{when}", mine, expected)

    def _excused(self, mine: Tensor) -> bool:
        """Gradients of gradients are zeros where torch's formulas, or ranks that hold nothing, have none."""
        return self.second_order and not whole(mine).any()

    def _compare_pieces(self, name: str, mine: DTensor) -> None:
        """Shards have the shape that their layout says, and the same bits as others of the same piece."""
        self.compared += 1
        found = list(prints(name, mine))
        problem = unequal(found)
        if problem is not None:
            raise Wrong(f"{problem} as {mine._layout}")
        self.prints += [(what, (self.compared, piece), bits) for what, piece, bits in found]


class _Ended(Exception):
    """What became of a program that could not go on."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def prints(what: str, x: DTensor) -> Iterator[Print]:
    """The bits of the pieces that are held here."""
    for piece, shard in pieces(what, x):
        if shard.numel() and "_strides" not in x.__dict__ and not what.endswith(".grad"):  # which no line uses
            yield f"{what}, its strides", None, zlib.crc32(repr(_strides(x._layout.shape, shard)).encode())
        bits = shard.resolve_conj().resolve_neg().contiguous().numpy().tobytes()
        yield what, piece, zlib.crc32(bits)


def _strides(shape: Sequence[int], shard: Tensor) -> list[int]:
    """The strides of the whole that a shard shows, where more than one step is taken."""
    steps = inferred_strides(shape, shard.shape, shard.stride())
    return [step for step, size in zip(steps, shape, strict=True) if size > 1]


def unequal(found: Sequence[Print]) -> str | None:
    """What replicas differ of, if they do."""
    seen: dict[Any, int] = {}
    for what, piece, bits in found:
        if seen.setdefault((what, piece), bits) != bits:
            return f"{what}: replicas differ"
    return None


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of those that the ranks came to, each for itself."""
    kinds = {verdict.kind for verdict in verdicts}
    if len(kinds) > 1:
        told = "; ".join(f"{verdict.kind} {verdict.detail}".strip() for verdict in verdicts)
        return Verdict(WRONG if WRONG in kinds else APART, f"ranks differ: {told}", max(v.at for v in verdicts))
    problem = unequal([print for verdict in verdicts for print in verdict.prints])
    return replace(verdicts[0], prints=[]) if problem is None else Verdict(WRONG, problem)
