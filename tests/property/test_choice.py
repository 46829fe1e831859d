"""What is chosen for a call can be predicted: nothing moves that need not, nothing is invented, sizes do not matter.

Calls are planned, and some are run on the simulator too. What a rule offers is taken from the rule; whether it fits is
found out here by trying all of it, not by asking whoever chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from sweep import mesh_of
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.planning.lower import Lowered, LoweredCall, lower
from shardwise.dispatch.planning.realise import CannotRealise, realise
from shardwise.dispatch.planning.trace import trace_call
from shardwise.layout import Layout, Partial
from shardwise.redistribute import Move, plan_moves
from shardwise.rules import PENDING, AxisPlacement, Call, Strategy, replicated, rule_for
from shardwise.rules.kit.treatments import treatment_of

MESHES = [(2,), (4,), (2, 2)]

Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function, str]] = {
    # element-wise
    "relu": (F.relu, "ij"),
    "gelu": (F.gelu, "ijk"),
    "exp": (torch.exp, "ij"),
    "neg": (torch.neg, "ij"),
    "mul by a number": (lambda x: x * 2.0, "ij"),
    "add a number": (lambda x: x + 2.0, "ij"),
    "clamp": (lambda x: x.clamp(-1, 1), "ij"),
    "to double": (Tensor.double, "ij"),
    "clone": (torch.clone, "ijk"),
    "add": (torch.add, "ij ij"),
    "add a row": (torch.add, "ijk k"),
    "add a column": (torch.add, "ij i1"),
    "sub": (torch.sub, "ijk ijk"),
    "mul": (torch.mul, "ij ij"),
    "mul by rows": (torch.mul, "ijk jk"),
    "div": (torch.div, "ij ij"),
    "maximum": (torch.maximum, "ij ij"),
    "lerp": (torch.lerp, "ij ij ij"),
    "addcmul": (torch.addcmul, "ij ij ij"),
    # products
    "mm": (torch.mm, "ik kj"),
    "bmm": (torch.bmm, "bik bkj"),
    "matmul": (torch.matmul, "bik kj"),
    "matmul of batches": (torch.matmul, "bik bkj"),
    "linear": (F.linear, "bik jk"),
    "linear with bias": (F.linear, "bik jk j"),
    "addmm": (torch.addmm, "j ik kj"),
    "outer": (torch.outer, "i j"),
    "dot": (torch.dot, "i i"),
    "mv": (torch.mv, "ij j"),
    "attention": (F.scaled_dot_product_attention, "bhik bhjk bhjk"),
    # reductions, norms and losses
    "sum of all": (torch.sum, "ijk"),
    "sum": (lambda x: x.sum(1), "ijk"),
    "mean": (lambda x: x.mean(0), "ij"),
    "amax": (lambda x: x.amax(2), "ijk"),
    "prod": (lambda x: x.prod(1), "ij"),
    "var": (lambda x: x.var(1, correction=0), "ij"),
    "logsumexp": (lambda x: x.logsumexp(1), "ij"),
    "softmax": (lambda x: x.softmax(-1), "ij"),
    "log_softmax": (lambda x: x.log_softmax(-1), "ijk"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), "bik k k"),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w), "bik k"),
    "cumsum": (lambda x: x.cumsum(0), "ij"),
    "argmax": (lambda x: x.argmax(1), "ij"),
    "sort": (lambda x: x.sort(1), "ij"),
    "mse_loss": (F.mse_loss, "ij ij"),
    "nll_loss": (F.nll_loss, "ij I"),
    "cross_entropy": (F.cross_entropy, "ij I"),
    # views and shapes
    "transpose": (lambda x: x.transpose(0, 2), "ijk"),
    "permute": (lambda x: x.permute(2, 0, 1), "ijk"),
    "merge": (lambda x: x.flatten(1), "ijk"),
    "merge all": (torch.flatten, "ijk"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "ij"),
    "expand": (lambda x: x.expand(3, -1, -1), "ij"),
    "select": (lambda x: x[0], "ij"),
    "narrow": (lambda x: x[:, : (x.shape[1] + 1) // 2], "ij"),
    "chunk": (lambda x: x.chunk(2, 1), "ij"),
    "flip": (lambda x: x.flip(1), "ij"),
    "roll": (lambda x: x.roll(1, 0), "ij"),
    "pad": (lambda x: F.pad(x, (1, 0)), "ij"),
    "tril": (torch.tril, "ij"),
    "cat": (lambda x, y: torch.cat([x, y]), "ij kj"),
    "cat of equals": (lambda x, y: torch.cat([x, y], 1), "ij ij"),
    "stack": (lambda x, y: torch.stack([x, y]), "ij ij"),
    # look-ups
    "embedding": (F.embedding, "I ik"),
    "index_select": (lambda x, at: x.index_select(0, at), "ij I"),
    "gather": (lambda x, at: x.gather(1, at), "ij Ij"),
    "where": (lambda at, x, y: torch.where(at > 0, x, y), "Ij ij ij"),
}
"""Functions of tensors, and their shapes: a letter for each dim. A capital stands for a dim of a tensor of indices."""


def tensors_of(shapes: str, sizes: dict[str, int]) -> list[Tensor]:
    found = []
    for letters in shapes.split():
        shape = [1 if letter == "1" else sizes[letter.lower()] for letter in letters]
        found.append(torch.zeros(shape, dtype=torch.long) if letters[0].isupper() else torch.ones(shape))
    return found


class Planned:
    """A call in some layouts, planned."""

    def __init__(
        self, name: str, sizes: dict[str, int], mesh: Any, where: Sequence[Sequence[sw.Placement]], parameters: set[int]
    ) -> None:
        self.function, shapes = FUNCTIONS[name]
        self.name, self.sizes, self.parameters = name, sizes, parameters
        self.tensors = tensors_of(shapes, sizes)
        self.mesh, self.where = mesh, where
        self.layouts = [Layout.of(mesh, x.shape, at) for x, at in zip(self.tensors, where, strict=True)]
        metas = [x.to("meta").requires_grad_(x.is_floating_point()) for x in self.tensors]
        trace = trace_call(treatment_of(self.function).stand_in or self.function, metas, {}, metas, torch.device("cpu"))
        trace.parameters = {trace.inputs[i].index for i in parameters}
        self.lowered = lower(trace, self.layouts)

    def times(self, factor: int) -> Planned:
        """The same call with all sizes multiplied."""
        sizes = {letter: size * factor for letter, size in self.sizes.items()}
        return Planned(self.name, sizes, self.mesh, self.where, self.parameters)

    def run(self) -> Any:
        return self.function(
            *(sw.distribute_tensor(x, self.mesh, at) for x, at in zip(self.tensors, self.where, strict=True))
        )

    def have(self, call: Call) -> list[Layout]:
        """Where the inputs of a call are before it."""
        return [self.lowered.layouts[value.index] for value in call.inputs]


@st.composite
def planned(draw: Any, *, smallest: int = 1) -> Planned:
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    shapes = FUNCTIONS[name][1]
    sizes = {letter: draw(st.integers(smallest, 8)) for letter in sorted(set(shapes.lower()) - set(" 1"))}
    mesh = mesh_of(draw(st.sampled_from(MESHES)))
    where = [[draw(st.sampled_from(_placements(letters))) for _ in mesh.shape] for letters in shapes.split()]
    parameters = draw(st.sets(st.integers(0, len(where) - 1), min_size=1))
    note(f"{name} {sizes} on {mesh}: {where}, {parameters=}")
    return Planned(name, sizes, mesh, where, parameters)


def _placements(letters: str) -> list[sw.Placement]:
    pending = [] if letters[0].isupper() else [sw.Partial(), sw.Partial("avg")]
    return [sw.Replicate(), *map(sw.Shard, range(len(letters))), *pending]


def at(layouts: Sequence[Layout], axis: int) -> list[AxisPlacement]:
    return [layout.pending[axis] or layout.axis_dims[axis] for layout in layouts]


def sends(moves: Sequence[tuple[Move, ...]]) -> bool:
    return any(move.communicates for path in moves for move in path)


# 1. Nothing moves that need not


def offered(call: Call) -> list[Strategy]:
    """What a rule offers, with every reduction that may be pending written out."""
    rule = rule_for(call.op)
    found = []
    for way in rule.strategies(call) if rule is not None else [replicated(call)]:
        fillings = [Partial("sum"), Partial("avg")] if PENDING in way.ins else [None]
        for filling in fillings:
            ins, outs = (tuple(filling if p is PENDING else p for p in side) for side in (way.ins, way.outs))
            found.append(Strategy(ins, outs, way.cost, way.resize))
    return found


def fits(way: Strategy, call: Call, now: Sequence[AxisPlacement]) -> bool:
    """Whether inputs are where a strategy wants them, but for slices of whole ones, and biases that are to count once;
    and it does not pass a pending value on as a larger one."""
    out = max((value.numel for value in call.outputs), default=0)
    pending = [value for value, wanted in zip(call.inputs, way.ins, strict=True) if isinstance(wanted, Partial)]
    contracts = any(isinstance(wanted, int) for wanted in way.ins)
    for value, wanted, here in zip(call.inputs, way.ins, now, strict=True):
        if wanted == here or (here is None and isinstance(wanted, int)):
            continue
        if here is not None or value.numel >= out or not (contracts or out <= max(x.numel for x in pending)):
            return False
    return call.is_view or contracts or not pending or _bytes(call.outputs) <= _bytes(pending)


def _bytes(values: Sequence[Any]) -> int:
    return sum(value.numel * value.dtype.itemsize for value in values)


def fitting(call: Call, have: Sequence[Layout]) -> Iterator[tuple[Strategy, ...]]:
    """Strategies for all axes for which nothing need be sent, together."""
    mesh = have[0].mesh
    each = [[way for way in offered(call) if fits(way, call, at(have, axis))] for axis in range(mesh.ndim)]
    for ways in islice(product(*each), 200):
        try:
            wanted = realise(call, ways, have, mesh)
        except CannotRealise:
            continue
        if not sends([plan_moves(*pair) for pair in zip(have, wanted.ins, strict=True)]):
            yield ways


def inputs_that_fit_do_not_move(one: Planned) -> None:
    reduced: set[int] = set()  # an earlier call has reduced what is pending on them, and others need not be asked again
    for lowered in one.lowered.calls:
        have = one.have(lowered.call)
        again = any(value.index in reduced for value in lowered.call.inputs)
        reduced.update(
            value.index
            for value, before, after in zip(lowered.call.inputs, have, lowered.layouts.ins, strict=True)
            if before.pending != after.pending
        )
        if have and not again and any(fitting(lowered.call, have)):
            assert not sends(lowered.moves), f"{lowered.call}: {have} -> {lowered.layouts.ins}"
            assert not sends(lowered.out_moves), f"{lowered.call}: {have} -> {lowered.layouts.outs}"


@settings(max_examples=80, deadline=None)
@given(planned())
def test_what_is_planned_without_moves_runs_without_any(one: Planned) -> None:
    assume(not any(_communicates(lowered) for lowered in one.lowered.calls))
    with CommDebugMode() as comm:
        one.run()
    assert [c for c in comm.comms if c.function != "distribute_tensor"] == []


def _communicates(lowered: LoweredCall) -> bool:
    is_program = lowered.local is not None and bool(lowered.local.groups)
    return is_program or sends(lowered.moves) or sends(lowered.out_moves)


# 2. Nothing is invented


def no_placement_is_invented(one: Planned) -> None:
    for lowered in one.lowered.calls:
        have = one.have(lowered.call)
        for axis in range(one.mesh.ndim):
            before, wanted = at(have, axis), at(lowered.layouts.ins, axis)
            if before != wanted:
                kept = any(x is not None and x == y for x, y in zip(before, wanted, strict=True))
                assert kept or all(x is None for x in wanted), f"{lowered.call}, {axis=}: {before} -> {wanted}"


# 3. Sizes do not matter


def placed(lowered: Lowered) -> list[tuple]:
    """The layouts of all values, without sizes."""
    return [(layout.splits, layout.pending) for _, layout in sorted(lowered.layouts.items())]


def in_conflict(lowered: LoweredCall) -> bool:
    """Whether operands do not fit: one is moved, or padded to become a term of a pending sum."""
    padded = any(move.kind == "pad" for path in lowered.moves for move in path)
    return padded or sends(lowered.moves) or sends(lowered.out_moves)


def grows(lowered: LoweredCall) -> tuple[bool, ...]:
    """Whether a call makes more of its inputs than they are: then what is pending on them is reduced before it."""
    return tuple(_bytes(lowered.call.outputs) > _bytes([value]) for value in lowered.call.inputs)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_layouts_are_the_same_at_eight_times_the_size(data: Any) -> None:
    one = data.draw(planned(smallest=2))
    assume(len(one.tensors) == 1 or not any(map(in_conflict, one.lowered.calls)))
    larger = one.times(8)
    assume(list(map(grows, larger.lowered.calls)) == list(map(grows, one.lowered.calls)))
    assert placed(larger.lowered) == placed(one.lowered)


# 4. Parameters are gathered, or stay


def gathers_an_outer_axis(before: Layout, wanted: Layout) -> bool:
    """Whether of two axes that shard one dim the inner one stays: pieces must then change places to be gathered."""
    cuts = zip(before.splits, wanted.splits, strict=True)
    return any(a not in after and b in after for cut, after in cuts for a, b in combinations(cut, 2))


def parameters_are_not_sharded_along_another_dim(one: Planned) -> None:
    parameters = set(one.lowered.trace.parameters)
    for lowered in one.lowered.calls:
        for value, path, wanted in zip(lowered.call.inputs, lowered.moves, lowered.layouts.ins, strict=True):
            if value.index in parameters:
                before = one.lowered.layouts[value.index]
                dims = [(before.axis_dims[axis], wanted.axis_dims[axis]) for axis in range(one.mesh.ndim)]
                assert all(was == now or None in (was, now) for was, now in dims), f"{lowered.call}: {before}, {wanted}"
                exchanged = any(move.kind == "all_to_all" for move in path)
                assert not exchanged or gathers_an_outer_axis(before, wanted), f"{lowered.call}: {before}, {wanted}"
        if lowered.call.is_view and lowered.call.inputs[0].index in parameters:
            parameters.update(value.index for value in lowered.call.outputs)


# All of this is asked of the same calls: planning them is what takes time


@settings(max_examples=200, deadline=None)
@given(planned())
def test_what_is_chosen_for_a_call(one: Planned) -> None:
    inputs_that_fit_do_not_move(one)
    no_placement_is_invented(one)
    parameters_are_not_sharded_along_another_dim(one)
