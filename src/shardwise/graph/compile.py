"""`shardwise.compile`: functions that are captured once, and then run without Python's part in them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn, optim

from shardwise.comm import noters
from shardwise.comm.agreement import compared, digest
from shardwise.errors import CaptureError, CaptureWarning, NoDataError, ShardwiseError
from shardwise.graph.capture.capture import capture_varying
from shardwise.graph.captured import Captured
from shardwise.graph.guards.call import Call, flattened
from shardwise.graph.guards.groups import gathered_anew, keep_gradients
from shardwise.graph.guards.guards import FIRST, Guards
from shardwise.graph.guards.iterators import Untaken
from shardwise.graph.guards.reached import Reached
from shardwise.graph.guards.side_effects import Before, MakesState
from shardwise.graph.nodes import collective_of
from shardwise.graph.passes import DEFAULT, PASSES, optimised
from shardwise.graph.program import Program
from shardwise.graph.run.function import DifferentiableRun
from shardwise.graph.run.inductor import by_inductor
from shardwise.graph.run.run import Make, Run, by_nodes, slots_of
from shardwise.layout import Mesh
from shardwise.parallel.agreement import agreed
from shardwise.redistribute import is_keeping

MAX_PROGRAMS = 8
"""Programs kept of one function. One that would need more is not the kind of function to capture."""

BACKENDS: dict[str, Make] = {"fx": by_nodes, "inductor": by_inductor}


class Compiled(Captured):
    """A function, with the programs that were captured of it."""

    failed_elsewhere: ShardwiseError = CaptureError(
        "the program could not be captured on another rank, whose error says why"
    )

    def __init__(self, function: Callable[..., Any], backend: Make, *, passes: Sequence[str], fullgraph: bool) -> None:
        super().__init__(function)
        self.backend = backend
        self.passes = passes
        self.fullgraph = fullgraph
        self._warmed: set[int] = set()
        self._varying: set[str] = set()
        self._said = False
        self._digests: dict[int, int] = {}
        self._meshes: dict[Mesh, None] = {}
        """Those that programs run on."""
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gave_up or noters:
            return self.function(*args, **kwargs)
        leaves, spec = flattened(args, kwargs)
        for guards, run in self.runs:
            if guards.miss(leaves, spec) is None and run.holds(leaves):
                if self._serves_all(run):
                    return run(leaves)
                break
        else:
            self._serves_all(None)
        return self._first(Call.of(self.function, args, kwargs, leaves, spec))

    def _serves_all(self, run: Run | None) -> bool:
        """Whether programs serve the call on all ranks; if one captures anew, all must. On the CPU only: an accelerator
        would first have to finish all that it was given."""
        number = 0 if run is None else self._digests[id(run)]
        for mesh in (mesh for mesh in self._meshes if mesh.device_type == "cpu"):
            different, missed = compared(mesh, number, run is None)
            if missed:
                return False
            if different:
                raise _DIFFERS
        return True

    def _first(self, call: Call) -> Any:
        """A call that no program serves yet."""
        missed = self._missed(call) or ELSEWHERE
        if call.is_recorded():
            raise NoDataError(_NO_DATA.format(self.name))
        if keep_gradients(call.reached):
            return self._as_it_is(call)
        if self._is_first_step(call.reached):
            return call()
        if self.runs and self._is_kept_from(self.runs[0][0]):
            return self._as_it_is(call)
        if len(self.runs) >= MAX_PROGRAMS:
            why = (
                f"was captured {len(self.runs)} times, and again something differs ({missed}): from now on it runs as "
                f"it is. Hand in numbers that change as tensors, batches in few shapes, and objects that are made "
                f"anew as dicts or tuples (or call torch.export.register_dataclass with their class)"
            )
            return self._give_up(why, call)
        try:
            run = self._add(call, missed)
        except MakesState:
            return call()
        except Exception as error:  # of ours, or of what in the function has no use for tensors without data
            if self.fullgraph:
                raise
            return self._give_up(f"runs as it is: {error}", call)
        if self._is_kept_from(self.runs[0][0]):
            return self._as_it_is(call)
        return run(call.leaves)

    def _is_kept_from(self, guards: Guards) -> bool:
        """Whether a program would reduce gradients that no_sync() keeps, or miss those that it has kept."""
        return guards.makes_gradients and is_keeping()

    def _as_it_is(self, call: Call) -> Any:
        if not self._said:
            warnings.warn(f"shardwise.compile: {self.name} {_KEPT}", CaptureWarning, stacklevel=4)
        self._said = True
        return call()

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the program that a call with these arguments would run, and run nothing: to look at it, or to price
        what no machine here could run, on a mesh that only records (`shardwise.recording`).

        An optimizer makes its state in its first step. So there must have been one, or none of it would be captured; on
        a mesh that only records it is made here.
        """
        call = Call.of(self.function, args, kwargs, *flattened(args, kwargs))
        missed = self._missed(call)
        if missed is None:
            return
        if self._new(call.reached) and not call.is_recorded():
            raise CaptureError(_NO_STATE.format(self.name))
        if self._is_first_step(call.reached):
            call()
        try:
            self._add(call, missed)
        except MakesState:
            raise CaptureError(_NO_STATE.format(self.name)) from None

    def _missed(self, call: Call) -> str | None:
        """Why none of the programs serves a call; None if one does."""
        missed = None if self.runs else FIRST
        for guards, run in self.runs:
            differs = guards.miss(call.leaves, call.spec)
            if differs is None and run.holds(call.leaves):
                return None
            missed = missed or differs or BRANCHES
        return missed

    def _add(self, call: Call, why: str) -> Run:
        """One more program."""
        self._varying.update(*(guards.varying() for guards, _ in self.runs))
        program = self._agreed(call)
        guards = Guards(call.with_lookups(), program, why)
        run = self._run_of(program, call)
        self.runs.insert(0, (guards, run))
        self._digests[id(run)] = digest(collectives_of(program))
        self._meshes |= dict.fromkeys(call.meshes())
        return run

    def _run_of(self, program: Program, call: Call) -> Run:
        if call.is_recorded():
            return Recorded(program, self.name)
        kind = Run if program.differentiable is None else DifferentiableRun
        return kind(program, self.backend, slots_of(call.reached.optimizers.values()))

    def _is_first_step(self, reached: Reached) -> bool:
        """Whether an optimizer has not stepped yet: it makes its state then, so this call runs as it is."""
        new = self._new(reached)
        self._warmed |= new
        return bool(new)

    def _new(self, reached: Reached) -> set[int]:
        return {key for key, optimizer in reached.optimizers.items() if _is_new(optimizer)} - self._warmed

    def _agreed(self, call: Call) -> Program:
        """The program after passes, if all ranks of the meshes that it runs on have captured the same."""
        meshes = [*dict.fromkeys((*self._meshes, *call.meshes()))]
        find = partial(self._find, call)
        for mesh in meshes:
            find = partial(agreed, mesh, find, collectives_of, self.failed_elsewhere, _DIFFERS)
        return optimised(find(), self.passes, meshes) if self.passes else find()

    def _find(self, call: Call) -> Program:
        before = Before(call.reached)
        try:
            with call.lookups, gathered_anew(call.reached), Untaken(call.reached.iterators):
                program = capture_varying(self._varying, call.function, *call.args, **call.kwargs)
        except BaseException:
            with suppress(CaptureError):
                before.put_back()
            raise
        before.put_back()
        return program

    def _give_up(self, why: str, call: Call) -> Any:
        warnings.warn(f"shardwise.compile: {self.name} {why}", CaptureWarning, stacklevel=4)
        found = call()  # if this raises as well, it is not for the capture
        self.gave_up = why
        return found


class Recorded(Run):
    """A program on tensors without data. It can be looked at."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name

    def holds(self, leaves: Sequence[Any]) -> bool:
        return True

    def __call__(self, leaves: Sequence[Any]) -> Any:
        raise NoDataError(_NO_DATA.format(self.name))


_NO_DATA = (
    "{} is captured on a mesh that only records, and there are no data to run it on: capture(…) it, and then show() "
    "it, list its comms() or price() it; called without shardwise.compile, its collectives are recorded"
)
_KEPT = (
    "runs as it is while no_sync(), or a fully sharded module, keeps gradients: capture all passes of an accumulation "
    "as one step, or capture the module alone"
)
_NO_STATE = (
    "{} steps an optimizer that has not stepped yet, and so has no state to be captured: call it once, then capture"
)
ELSEWHERE = "on another rank something differs"
BRANCHES = "a number that Python branches on, a count of steps say, is another one"


def _is_new(optimizer: optim.Optimizer) -> bool:
    """Whether it has not stepped yet: it has no state, or there are no gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return not optimizer.state or all(param.grad is None for param in params)


_DIFFERS = CaptureError(
    "the ranks' programs differ in what they communicate, so they cannot run together: look for what depends on a "
    "rank's number, or on data of its own"
)


def collectives_of(program: Program) -> list[tuple[Any, ...]]:
    """What all ranks must have in common: the collectives, in their order."""
    made = (collective_of(node) for part in program.ranks for node in part.graph.nodes)
    return [(collective.kind, collective.axes) for collective in made if collective is not None]


def compile(
    target: Callable[..., Any],
    *,
    backend: str = "inductor",
    passes: str | Sequence[str] = "default",
    cuda_graph: bool | str = "auto",
    dynamic: bool = False,
    fullgraph: bool = True,
) -> Any:
    """A function that is captured at its first call, and then runs as a program.

    `passes` are names of what is done to the program before it runs: those that only ever save something ("default"),
    none of them, `()`, or some, as in `passes=[*DEFAULT, "gather_again"]` with `shardwise.graph.passes.DEFAULT`.
    `programs` of what this returns have `reports` that say what each has done.
    """
    if dynamic:
        raise ValueError(
            f"dynamic=True is not available: layouts, and so programs, are made for sizes. Without it each shape has a "
            f"program of its own, up to {MAX_PROGRAMS}: pad batches to a few lengths"
        )
    if not callable(target):
        raise TypeError(f"a function or a module is compiled, not a {type(target).__name__}")
    make = make_of(backend, cuda_graph)
    chosen = _chosen(passes)
    if isinstance(target, nn.Module):
        target._compiled_call_impl = Compiled(target._call_impl, make, passes=chosen, fullgraph=fullgraph)
        return target
    return Compiled(target, make, passes=chosen, fullgraph=fullgraph)


def _chosen(passes: str | Sequence[str]) -> tuple[str, ...]:
    """The names of passes."""
    if passes == "default":
        return DEFAULT
    found = (passes,) if isinstance(passes, str) else tuple(passes)
    if unknown := [name for name in found if name not in PASSES]:
        raise ValueError(f"passes are 'default', or some of {', '.join(map(repr, PASSES))}; got {unknown[0]!r}")
    return found


def make_of(backend: str, cuda_graph: bool | str) -> Make:
    """What makes parts run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    if cuda_graph not in (True, False, "auto"):
        raise ValueError(f"cuda_graph is True, False or 'auto'; got {cuda_graph!r}")
    return partial(by_inductor, cuda_graph=cuda_graph) if backend == "inductor" else BACKENDS[backend]


def programs_of(target: Any) -> Compiled:
    """What was captured of a function or a module that `compile` was given."""
    found = getattr(target, "_compiled_call_impl", None) if isinstance(target, nn.Module) else target
    if not isinstance(found, Compiled):
        raise TypeError(f"shardwise.compile was not given this {type(target).__name__}")
    return found
