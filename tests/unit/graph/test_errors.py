"""What is said of functions that cannot be captured: where in the user's program, why, and what to do."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captured import batch
from saved import fake_mesh
from torch import Tensor, fx

import shardwise as sw
from shardwise.comm.agreement import largest
from shardwise.errors import CaptureError
from shardwise.graph.program import Line
from shardwise.graph.run.numbers_as_tensors import on_tensors

ADVICE = (
    "A captured program does the same in every run: compute with tensors (torch.where instead of if), return the "
    "tensor and look at it outside, or capture less; fullgraph=False runs such a function as it is"
)


def refusal(function: Callable[..., Any], *given: Any, backend: str = "fx", **options: Any) -> str:
    """What is said of a call, with LINE for the second line of the function."""
    with pytest.raises(CaptureError) as caught:
        sw.compile(function, backend=backend, **options)(*given)
    where = f"{__file__}, line {inspect.getsourcelines(function)[1] + 1}"
    return str(caught.value).replace(where, "LINE")


def branches(x: Any) -> Any:
    return x + 1 if x.sum() > 3 else x


def picks(x: Any) -> Any:
    return x[x > 0]


def branches_on_a_number(x: Any) -> Any:
    return x + 1 if (x.max().item() - 1.5) * 2 > 3 else x


def prints(x: Any) -> Any:
    return f"{x.max().item() / 2:.3f}"


def truncates(x: Any) -> Any:
    return int(x.max().item())


def hands_out_arrays(x: Any) -> Any:
    return np.asarray(x)


def counts(x: Any) -> Any:
    return x[: x.argmax().item()]


def has_the_length(x: Any) -> Any:
    return torch.arange(x.max().item())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (branches, "a number is read out of a tensor"),
        (branches_on_a_number, "a number is read out of a tensor"),
        (prints, "a number is read out of a tensor"),
        (counts, "a number is read out of a tensor"),
        (truncates, "a number is read out of a tensor"),
        (hands_out_arrays, "__array__ hands out what is in a tensor"),
        (has_the_length, "a number is read out of a tensor"),
        (picks, "what index gives is as long as they say"),
    ],
)
@pytest.mark.parametrize("is_distributed", [False, True])
def test_what_depends_on_data(function: Callable[[Any], Any], why: str, is_distributed: bool) -> None:
    x = batch(sw.simulate((2, 2), ("dp", "tp")), 0) if is_distributed else torch.ones(3)
    assert refusal(function, x) == f"the program depends on the data it computes (LINE): {why}. {ADVICE}"


def test_lists_of_numbers() -> None:
    """Of a plain tensor they are numbers that are read out of it."""
    x = batch(sw.simulate((2, 2), ("dp", "tp")), 0)
    assert "(LINE): tolist hands out what is in a tensor" in refusal(listed, x)
    assert sw.compile(listed, backend="fx")(torch.ones(2)) == [2, 2]


def listed(x: Any) -> Any:
    return (x * 2).tolist()


def test_ranks_may_ask_each_other_meanwhile() -> None:
    """What they say is nobody's program, so they may look at it."""
    with fake_mesh(2, names=("tp",)) as mesh:
        x = sw.DTensor.from_local(torch.ones(3), mesh)
        compiled = sw.compile(lambda x: x * largest(x._layout.mesh, [3])[0], backend="fx")
        assert compiled(x).to_local().tolist() == [3, 3, 3]


def test_tensors_that_a_capture_leaves_behind() -> None:
    """Where nothing looks for them."""
    kept = threading.local()

    def keeps(x: Any) -> Any:
        kept.y = x + getattr(kept, "y", 1)
        return kept.y.sum()

    sw.compile(keeps, backend="fx")(torch.ones(3))
    assert refusal(keeps, torch.ones(3)) == (
        "the program uses a tensor of shape [3] (LINE) that has no data, since it was left behind by a capture, in an "
        "attribute or a list say: what is kept from call to call must be returned, or written to in place"
    )
    del kept.y
    sw.compile(keeps, backend="fx")(batch(sw.simulate((2, 2), ("dp", "tp")), 0))
    with pytest.raises(CaptureError) as caught:
        kept.y.full_tensor()
    assert str(caught.value) == (
        "a tensor on Mesh(dp=2, tp=2) is used that has no data, since it was left behind by a capture: what is needed "
        "outside of a captured function must be returned by it"
    )


def test_gradients_that_could_not_flow_back() -> None:
    computed = torch.ones(4, requires_grad=True) * 2

    def uses(x: Tensor) -> Tensor:
        return x * computed

    assert refusal(uses, torch.ones(4)) == (
        "the program uses a tensor of shape [4] (LINE) that was computed outside of it and needs a gradient, which "
        "could not flow back: detach() it, or compute it inside"
    )


@pytest.mark.parametrize("is_distributed", [False, True])
def test_generators_of_ones_own(is_distributed: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draws(x: Any) -> Any:
        return x * torch.empty_like(x).uniform_(generator=generator)

    x = batch(sw.simulate((2, 2), ("dp", "tp")), 0) if is_distributed else torch.ones(3)
    assert refusal(draws, x) == (
        "the program draws from a torch.Generator of its own (LINE), which it cannot be given: draw from torch's "
        "default generator (torch.manual_seed), or hand in what was drawn"
    )


def test_what_compiles_nowhere() -> None:
    x = batch(sw.simulate((2, 2), ("dp", "tp")), 0)
    said = 'on a simulated mesh programs run node by node: use backend="fx"'
    assert refusal(lambda x: x + 1, x, backend="inductor") == said
    assert refusal(lambda x: x + 1, torch.ones(3, 4), backend="inductor", cuda_graph=True) == (
        'the program cannot be a CUDA graph: a tensor of shape [3, 4] is on cpu; cuda_graph="auto" runs it without one'
    )


def test_numbers_that_no_compiled_op_takes() -> None:
    graph = fx.Graph()
    number = graph.placeholder("lr")
    node = graph.call_function(torch.ops.aten.hardtanh.default, (graph.placeholder("x"), -1.0, number))
    node.meta["line"] = Line("train.py", 7, False)
    with pytest.raises(CaptureError) as caught:
        on_tensors(node, {number}, (torch.ones(2), -1.0, torch.ones(())), {})
    assert str(caught.value) == (
        "aten.hardtanh.default is given a number that changes from run to run (train.py, line 7), and has no compiled "
        'form that takes one: use backend="fx", or keep the number in a tensor'
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_data_that_are_replaced(sharded: bool) -> None:
    mesh = sw.simulate((2,), ("tp",))
    kept, given = (
        sw.distribute_tensor(x, mesh, [sw.Shard(0)]) if sharded else x for x in (torch.zeros(6), torch.ones(6))
    )

    def replaces(x: Tensor) -> None:
        kept.data = x * 2

    assert refusal(replaces, given) == (
        "the program replaces the data of a tensor of shape [6] (LINE), which only Python would do in every run: "
        "write to it in place (copy_)"
    )
    assert not (kept.full_tensor() if isinstance(kept, sw.DTensor) else kept).any()


@pytest.mark.parametrize("sharded", [False, True])
def test_data_of_what_the_program_made_may_be_replaced(sharded: bool) -> None:
    def replaces(x: Tensor) -> Tensor:
        made = x + 1
        made.data = x * 2
        return made * 3

    mesh = sw.simulate((2,), ("tp",))
    given = sw.distribute_tensor(torch.ones(6), mesh, [sw.Shard(0)]) if sharded else torch.ones(6)
    out = sw.compile(replaces, backend="fx")(given)
    assert (out.full_tensor() if isinstance(out, sw.DTensor) else out).tolist() == [6.0] * 6
