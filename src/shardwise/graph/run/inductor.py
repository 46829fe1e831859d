"""Programs as Inductor takes them: torch's ops and functional collectives, and tensors in the place of numbers.

A part of a program is traced once more. What only means something to us becomes ops on the way: collectives those of
torch's functional ones that the port of process groups would make; ops with numbers of the host the same on tensors, so
that another learning rate is not another kernel; draws from streams of random numbers ops of our own.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.functional import functional_mesh
from shardwise.comm.wire import joined
from shardwise.errors import CaptureError
from shardwise.graph.nodes import Check, Collective, Seeded, Start, collective_of, wait
from shardwise.graph.program import Part
from shardwise.graph.run.cuda_graphs import Replayed, obstacle
from shardwise.graph.run.fused_steps import FUSED_STEPS
from shardwise.graph.run.numbers_as_tensors import computed, on_tensors
from shardwise.graph.run.run import taken
from shardwise.graph.run.seeded_ops import seeded_op
from shardwise.rules.kit.kernels import passes

_disabled = torch._C.DisableTorchFunctionSubclass


def by_inductor(
    parts: Sequence[Part], is_joint: bool, *, cuda_graph: bool | str = "auto"
) -> Callable[[Sequence[Sequence[Any]]], Any]:
    """What runs the part of this rank as Inductor compiles it."""
    if is_joint or len(parts) > 1:
        raise CaptureError('on a simulated mesh programs run node by node: use backend="fx"')
    why_not = obstacle(parts[0]) if cuda_graph else "cuda_graph=False"
    if cuda_graph is True and why_not is not None:
        raise CaptureError(f'the program cannot be a CUDA graph: {why_not}; cuda_graph="auto" runs it without one')
    return _Compiled(parts[0], why_not)


class _Compiled:
    """A part that is compiled when it is first given inputs."""

    def __init__(self, part: Part, no_cuda_graph: str | None) -> None:
        self.part, self.no_cuda_graph = part, no_cuda_graph
        self.device = _device_of(part)
        self.checks = [node for node in part.graph.nodes if isinstance(node.target, Check)]
        *_, last = part.graph.nodes
        self.numbers = [(at, node.meta["number"]) for at, node in enumerate(last.args[0]) if "number" in node.meta]
        self.run: Any = None

    def __call__(self, inputs: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        given = _packed(inputs[0], self.device)
        if self.run is None:
            given = [x.detach() for x in given]  # at its first run torch looks at tensors in Python, as plain ones
            compiled = self._compile(given)
            self.run = lambda given: compiled(*given)
            if self.no_cuda_graph is None:
                self.run = Replayed(self.part, self.run)
        outputs = self.run(given)
        for node, found in zip(self.checks, outputs[len(outputs) - len(self.checks) :]):
            node.target(found)
        if self.numbers:
            outputs = [*outputs]
        for at, kind in self.numbers:
            outputs[at] = kind(outputs[at].item())
        return (outputs,)

    def _compile(self, given: Sequence[Tensor]) -> Any:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's own
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(lowered(self.part.graph, given), given)


def _device_of(part: Part) -> torch.device:
    """Where the program computes: on an accelerator, if any of its inputs is there."""
    inputs = (node.meta.get("facts") for node in part.graph.nodes if node.op == "placeholder")
    return next((facts.device for facts in inputs if facts and facts.device.type != "cpu"), torch.device("cpu"))


def _packed(inputs: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Tensors as they are, and behind them all numbers in two: in one, on the device, what is computed with; in the
    other the seeds."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    for kind, dtype in NUMBERS:
        if numbers := [x for x in inputs if isinstance(x, kind)]:
            packed = torch.tensor(numbers, dtype=dtype)
            moves = kind is float and device.type == "cuda"
            tensors.append(packed.pin_memory().to(device, non_blocking=True) if moves else packed)
    return tensors


NUMBERS = ((float, torch.float64), (int, torch.int64))


def lowered(graph: fx.Graph, examples: Sequence[Tensor]) -> fx.GraphModule:
    """A rank's graph in torch's own ops, for tensors like these. What checks look at comes after the outputs."""
    fakes = FakeTensorMode()
    inputs = [fakes.from_tensor(x, static_shapes=True) for x in examples]
    with fakes:
        return make_fx(_Interpreter(graph).run)(*inputs)


class _Interpreter:
    """Runs a graph on what a tracer gives it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def run(self, *given: Tensor) -> list[Tensor]:
        env, numbers = self._inputs(given)
        looked_at: list[Tensor] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                return [*args[0], *looked_at]
            if isinstance(node.target, Check):
                looked_at.append(args[0])
            elif collective_of(node) is not None:
                env[node] = taken([_as_ops(node.target)], args)[0]
            elif isinstance(node.target, Seeded):
                env[node] = seeded_op(node.target)(*args, **kwargs)
            elif (step := FUSED_STEPS.get(getattr(node.target, "overloadpacket", None))) is not None:
                env[node] = step(*args, **kwargs)
            elif (source := _taken_from(node)) is not None:
                env[node] = joined(env[source], *args[1:])
            elif "number" in node.meta:
                env[node] = computed(node, args)
                numbers.add(node)
            elif not numbers.isdisjoint(node.all_input_nodes):
                env[node] = on_tensors(node, numbers, args, kwargs)
            else:
                env[node] = passes.get(node.target, node.target)(*args, **kwargs)
        raise AssertionError("a graph ends with its output")

    def _inputs(self, given: Sequence[Tensor]) -> tuple[dict[fx.Node, Any], set[fx.Node]]:
        """What placeholders stand for, and which of them for numbers."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        kinds = [node.meta.get("number") for node in inputs]
        tensors = iter(given)
        env = {node: next(tensors) for node, kind in zip(inputs, kinds, strict=True) if kind is None}
        for kind, _ in NUMBERS:
            nodes = [node for node, own in zip(inputs, kinds, strict=True) if own is kind]
            env.update(zip(nodes, next(tensors).unbind(), strict=True) if nodes else ())
        return env, {node for node, kind in zip(inputs, kinds, strict=True) if kind is not None}


def _taken_from(node: fx.Node) -> fx.Node | None:
    """The collective of which a node joins all that it brought, in order, if nobody else looks at that."""
    if node.target is not torch.ops.aten.cat.default:
        return None
    parts: Any = node.args[0]
    source = parts[0].args[0] if parts[0].target is operator.getitem else None
    if source is None or len(source.users) != len(parts):
        return None
    in_order = all(
        part.target is operator.getitem and part.args == (source, number) and len(part.users) == 1
        for number, part in enumerate(parts)
    )
    begun = source.args[0] if source.target is wait else source
    return source if in_order and collective_of(begun) is not None else None


def _as_ops(target: Any) -> Any:
    """A collective, or its start, as ops that write to nothing."""
    if isinstance(target, Start):
        return Start(_as_ops(target.collective))
    with _disable_current_modes():
        return Collective(target.kind, functional_mesh(target.mesh), target.axes, target.how)
