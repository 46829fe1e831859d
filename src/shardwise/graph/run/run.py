"""Running a program: its inputs are gathered, the parts run, and what they leave is put where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn, optim
from torch.utils._pytree import tree_map_only

from shardwise.comm import ranked, shards_of
from shardwise.graph.cost.comms import Runner, Told
from shardwise.graph.nodes import Collective, Start, collective_at, collective_of, wait
from shardwise.graph.program import (
    FromArgument,
    FromGradient,
    FromGroup,
    FromHost,
    FromObject,
    Given,
    Output,
    Part,
    Place,
    Program,
    Result,
    Source,
)
from shardwise.tensor import wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]

Leaves = Sequence[Any]
"""What a call is given, without its structure."""

Values = Sequence[Any]
"""What the host has computed."""

Make = Callable[[Sequence[Part], bool], Runner]
"""Makes what runs the parts of the ranks held here; or one part, of all of them together."""


Slots = Mapping[int, tuple[dict[str, Any], str]]
"""By the id of a tensor, where an optimizer keeps it."""


def slots_of(optimizers: Iterable[optim.Optimizer]) -> Slots:
    return {
        id(x): (own, key)
        for optimizer in optimizers
        for own in optimizer.state.values()
        for key, x in own.items()
        if isinstance(x, Tensor)
    }


class Run:
    """A program that is ready to run, by whatever way the ranks' parts are run."""

    def __init__(self, program: Program, make: Make, state: Slots | None = None) -> None:
        self.program = program
        self.host = _Host(program.host)
        self._conditions = _Host(program.conditions)
        self.parts = self._forward()
        self.runner = Told(make(self.parts, program.is_joint), self.parts, program.is_joint)
        self.inputs = [gathering(part.sources, state) for part in self.parts]

    def _forward(self) -> Sequence[Part]:
        return self.program.ranks

    def holds(self, leaves: Leaves) -> bool:
        """Whether the numbers that the program depends on are what they were."""
        expected = self.program.expected
        return not expected or self._conditions(leaves) == expected

    def __call__(self, leaves: Leaves) -> Any:
        with _disabled(), torch.no_grad():
            values = self.host(leaves)
            outputs = self.runner([read(leaves, values) for read in self.inputs])
            for gradient in self.program.gradients:
                grad = None if gradient.output is None else _get(gradient.output, outputs)
                _set_grad(shard_at(gradient.of, leaves), grad)
            return returned(self.program.results, outputs, leaves)


class _Host:
    """A part that computes numbers."""

    def __init__(self, part: Part) -> None:
        self._inputs = [_reader(source) for source in part.sources]
        self._is_empty = all(node.op == "output" for node in part.graph.nodes)
        self._run = compiled(part.graph)

    def __call__(self, leaves: Leaves) -> tuple[Any, ...]:
        if self._is_empty:
            return ()
        with _disabled(), torch.no_grad():
            return self._run(*[read(leaves, ()) for read in self._inputs])


def holds(program: Program, leaves: Leaves) -> bool:
    """Whether the numbers that a program depends on, which is not made to run yet, are what they were."""
    return not program.expected or _Host(program.conditions)(leaves) == program.expected


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function of Python's, which lets go of values when they are not needed any more."""
    return fx.GraphModule(nn.Module(), graph).forward


def gathering(sources: Sequence[Source], state: Slots | None = None) -> Callable[[Leaves, Values], list[Any]]:
    """What gathers the inputs of a part: one generated expression, since there may be thousands. What an optimizer
    keeps is read where it keeps it."""
    namespace: dict[str, Any] = {"shards_of": shards_of}
    terms = []
    for number, source in enumerate(sources):
        match source:
            case FromArgument(leaf, 0):
                terms.append(f"leaves[{leaf}]")
            case FromHost(at):
                terms.append(f"values[{at}]")
            case FromObject(tensor, owner, shard) if state and id(owner) in state:
                namespace[f"x{number}"], key = state[id(owner)]
                kept = f"x{number}[{key!r}]"
                terms.append(kept if tensor is owner else f"shards_of({kept})[{shard}]")
            case FromObject(tensor):
                namespace[f"x{number}"] = tensor
                terms.append(f"x{number}")
            case _:
                namespace[f"x{number}"] = _reader(source)
                terms.append(f"x{number}(leaves, values)")
    locals_ = "".join(f", {name}={name}" for name in namespace)
    exec(f"def gather(leaves, values{locals_}):\n    return [{', '.join(terms)}]", namespace)
    gather: Callable[[Leaves, Values], list[Any]] = namespace["gather"]
    return gather


def _reader(source: Source) -> Callable[[Leaves, Values], Any]:
    match source:
        case FromArgument(leaf, 0):
            return lambda leaves, values: leaves[leaf]
        case FromArgument(leaf, shard):
            return lambda leaves, values: leaves[leaf].__dict__["_peers"][shard - 1]
        case FromObject(tensor):
            return lambda leaves, values: tensor
        case FromGradient(of):
            return lambda leaves, values: _get_grad(shard_at(of, leaves))
        case FromGroup():
            return lambda leaves, values: source.read()
        case FromHost(number):
            return lambda leaves, values: values[number]
        case _:
            raise AssertionError(source)


def shard_at(place: Place, leaves: Leaves) -> Tensor:
    return place.tensor if isinstance(place, FromObject) else shards_of(leaves[place.leaf])[place.shard]


def _get(output: Output, outputs: Sequence[Sequence[Any]]) -> Any:
    return outputs[output.rank][output.number]


def returned(results: Any, outputs: Sequence[Sequence[Any]], leaves: Leaves) -> Any:
    def given(result: Given) -> Tensor:
        place = result.place
        return leaves[place.leaf] if isinstance(place, FromArgument) else place.tensor

    def made(result: Result) -> Any:
        shards = [_get(output, outputs) for output in result.shards]
        if not isinstance(shards[0], Tensor):
            return shards[0]
        local = shards[0] if len(shards) == 1 else ranked(shards)
        return local if result.layout is None else wrap(local, result.layout)

    return tree_map_only(Given, given, tree_map_only(Result, made, results))


# Node by node, as torch runs them: bit for bit what the function does without being captured


def by_nodes(parts: Sequence[Part], is_joint: bool) -> Runner:
    """What runs the ranks' parts node by node."""
    if len(parts) > 1:
        return Lockstep(parts)
    (part,) = parts
    run = compiled(part.graph if is_joint else _with_ports(part.graph))
    return lambda inputs: (run(*inputs[0]),)


def _with_ports(graph: fx.Graph) -> fx.Graph:
    """A rank's graph, with collectives as functions of what this rank brings."""
    made = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        env[node] = made.node_copy(node, env.__getitem__)
        if collective_of(node) is not None:
            env[node].target = Alone(node.target)
    return made


class Alone:
    """A collective as the only rank of this process takes part in it."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.__name__ = target.__name__

    def __call__(self, brought: Any) -> Any:
        return taken([self.target], [brought])[0]


def taken(targets: Sequence[Collective | Start], brought: Sequence[Any]) -> list[Any]:
    """What each of the ranks held here gets of one collective, that it makes or starts."""
    first = targets[0]
    if all(type(target) is type(first) for target in targets):
        return first(brought)
    begun = collective_at(first).start(brought)  # in the simulator one rank may go on where another waits
    return [one if isinstance(target, Start) else wait(one) for one, target in zip(begun, targets, strict=True)]


class Lockstep:
    """Ranks of the simulator: the program of each runs until it comes to a collective, then that of the next."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def __call__(self, inputs: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        running = [_steps(part.graph, given) for part, given in zip(self.parts, inputs, strict=True)]
        waiting: list[Any] = [next(one) for one in running]
        while not all(isinstance(at, _Done) for at in waiting):
            met = {None if isinstance(at, _Done) else collective_at(at[0]) for at in waiting}
            if len(met) > 1 or None in met:
                raise AssertionError(f"ranks do not meet in one collective: {waiting}")
            targets = [target for target, _ in waiting]
            found = taken(targets, [_apart(target, brought) for target, brought in waiting])
            waiting = [one.send(got) for one, got in zip(running, found, strict=True)]
        return [at.outputs for at in waiting]


def _apart(target: Collective | Start, brought: Any) -> Any:
    """What a rank brings, as others may keep it: the simulator hands on what is gathered as it is, and this rank may
    write to it before they have looked."""
    return brought.clone() if collective_at(target).kind == "all_gather" else brought


class _Done:
    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = outputs


def _steps(graph: fx.Graph, inputs: Sequence[Any]) -> Generator[Any, Any, None]:
    """A graph that stops at each collective with what it brings, and goes on with what it is sent."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    last = _last_uses(graph)
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "output":
            yield _Done(args[0])
        elif collective_of(node) is not None:
            env[node] = yield node.target, args[0]
        else:
            env[node] = node.target(*args, **kwargs)
        for used in last.get(node, ()):
            del env[used]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By the last node that needs it, what can be let go of."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for used in dict.fromkeys((node, *node.all_input_nodes)):
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found
