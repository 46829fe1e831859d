"""Small programs on which passes act, or may not: the same on the simulator and on processes. Numbers are small and
whole, so that sums are the same in whatever order they are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from captured import WIDTH, Made, assert_same
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.graph.nodes import collective_of
from shardwise.graph.passes import PASSES
from shardwise.graph.program import Program

R, S, SUM, MAX = sw.Replicate(), sw.Shard, sw.Partial(), sw.Partial("max")


def red(x: Any, *placements: Any) -> Any:
    return x.redistribute(placements=placements)


def whole_numbers(mesh: Any, shape: Sequence[int], placements: Sequence[Any], seed: int = 0) -> Any:
    """A tensor of small whole numbers in a layout."""
    x = torch.randint(-8, 9, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()
    return sw.distribute_tensor(x, mesh, placements)


@dataclass(frozen=True)
class Small:
    """A function of tensors of these layouts, all of one shape; what it communicates, and what after a pass."""

    name: str
    acts: str
    function: Callable[..., Any]
    given: Sequence[Sequence[Any]]
    before: Sequence[str]
    after: Sequence[str]
    shape: Sequence[int] = (5, 6)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def arguments(self, mesh: Any) -> list[Any]:
        return [whole_numbers(mesh, self.shape, placements, seed) for seed, placements in enumerate(self.given)]

    def program(self, mesh: Any, passes: Sequence[str] | str) -> Program:
        """The program after passes, that gives what the function gives and leaves its arguments as that does."""
        return program_of(self.function, lambda: self.arguments(mesh), passes)


def program_of(function: Callable[..., Any], make: Callable[[], Sequence[Any]], passes: Sequence[str] | str) -> Program:
    """The program of a function after passes. It is run, twice: it must give what the function gives, and leave its
    arguments as that does."""
    compiled = sw.compile(function, backend="fx", passes=passes)
    with torch.no_grad():
        for _ in range(2):
            wanted_of, found_of = make(), make()
            wanted, found = function(*wanted_of), compiled(*found_of)
            assert_same(found, wanted, "result")
            assert_same(list(found_of), list(wanted_of), "arguments")
    (program,) = compiled.programs
    return program


def kinds(program: Program, rank: int = 0) -> list[str]:
    """The collectives of a rank, in their order."""
    nodes = program.ranks[rank].graph.nodes
    return [collective.kind for node in nodes if (collective := collective_of(node)) is not None]


def ops(program: Program, rank: int = 0) -> list[str]:
    """What a rank runs, in its order, by names."""
    nodes = [node for node in program.ranks[rank].graph.nodes if node.op == "call_function"]
    return [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in nodes]


def only(name: str) -> tuple[str, ...]:
    """A pass, with what has to have run before it."""
    assert name in PASSES
    return ("tidy", name)


# What they are


def gathered_twice(x: Any) -> Any:
    return red(x, R, R) + red(x, R, R) * 2


def gathered_and_written_between(x: Any) -> Any:
    first = red(x, R, R)
    x.add_(1)
    return first + red(x, R, R)


def gathered_twice_and_given_back(x: Any) -> Any:
    return red(x, R, R), red(x, R, R)


def there_and_back(*layouts: Sequence[Any]) -> Callable[[Any], Any]:
    def moved(x: Any) -> Any:
        for placements in layouts:
            x = red(x, *placements)
        return x * 2

    return moved


def there_and_written(x: Any) -> Any:
    whole = red(x, R, R)
    whole.mul_(3)
    return red(whole, S(0), R) * 2


def there_and_used(x: Any) -> Any:
    whole = red(x, R, R)
    return red(whole, S(0), R) * 2, whole * 3


def back_from_what_changed(x: Any) -> Any:
    part = red(x, S(0), R)
    part.add_(1)
    return red(part, R, R) * 2


def to_and_written(x: Any) -> Any:
    there = red(x, S(1), R)
    there.add_(1)
    return red(there, S(0), R) * 2


def moved_from_and_written(x: Any) -> Any:
    there = red(x, S(1), R)
    x.add_(1)
    return red(there, S(0), R) * 2


def computed_cut_and_gathered(x: Any) -> Any:
    return red(red(x * 3, S(0), R), R, R) * 2


def averaged_and_split(x: Any) -> Any:
    return red(red(x.sum(-1), R, R) / 2, S(0), R)


def averaged_split_and_used(x: Any) -> Any:
    whole = red(x.sum(-1), R, R)
    return red(whole / 2, S(0), R), whole * 2


def cast_after(x: Any) -> Any:
    return red(x, R, R).bfloat16()


def cast_after_and_used(x: Any) -> Any:
    whole = red(x, R, R)
    return whole.bfloat16(), whole * 2


def cast_before(x: Any) -> Any:
    return red(x.bfloat16().float(), R, R) * 2


def gathered_and_added(x: Any, y: Any) -> Any:
    return red(x, R, R) + red(y, R, R)


def gathered_and_added_and_used(x: Any, y: Any) -> Any:
    whole = red(x, R, R)
    return whole + red(y, R, R), whole * 2


def two_sums(x: Any, y: Any) -> Any:
    return red(x.sum(0), R, R) * 2 + red(y.amin(1).sum(0), R, R)


def a_sum_of_a_sum(x: Any, y: Any) -> Any:
    total = red(x.sum(0), R, R)
    return red((y * total).sum(0), R, R)


def two_gathers(x: Any, y: Any) -> Any:
    return red(x, R, R) * 2, red(y, R, R) * 3


def gathered_meanwhile(x: Any, y: Any) -> Any:
    whole = red(x, R, R)
    other = (y * 2).exp2().sum(0)
    return whole * other


def written_meanwhile(x: Any, y: Any) -> Any:
    whole = red(x, R, R)
    x.add_(1)
    return whole * (y * 2).sum(0)


def reduced_and_gone(x: Any) -> Any:
    return red(x.sum(0), R, R) * 2


def reduced_and_kept(x: Any) -> Any:
    own = x.sum(0)
    return red(own, R, R) * 2, own


def view_reduced(x: Any) -> Any:
    own = x.sum(0)
    return red(own[:3], R, R) * 2 + red(own[3:], R, R)


def given_reduced(x: Any) -> Any:
    return red(x, R, R) * 2


GATHER, REDUCE, SCATTER, EXCHANGE = "all_gather", "all_reduce", "reduce_scatter", "all_to_all"
SPLIT, SPLIT_BOTH, ALIKE = (S(0), R), (S(0), S(1)), (R, R)

SMALL = [
    Small("gathered twice", "share", gathered_twice, [SPLIT], [GATHER] * 2, [GATHER]),
    Small("written between", "share", gathered_and_written_between, [SPLIT], [GATHER] * 2, [GATHER] * 2),
    Small("both given back", "share", gathered_twice_and_given_back, [SPLIT], [GATHER] * 2, [GATHER]),
    Small("gathered and cut", "cancel", there_and_back(ALIKE, SPLIT), [SPLIT], [GATHER], []),
    Small("cut and gathered", "cancel", computed_cut_and_gathered, [ALIKE], [GATHER], []),
    Small("to and fro", "cancel", there_and_back((S(1), R), SPLIT), [SPLIT], [EXCHANGE] * 2, []),
    Small("to, written and fro", "cancel", to_and_written, [SPLIT], [EXCHANGE] * 2, [EXCHANGE] * 2),
    Small("to and fro, written", "cancel", moved_from_and_written, [SPLIT], [EXCHANGE] * 2, [EXCHANGE] * 2),
    Small("gathered, written and cut", "cancel", there_and_written, [SPLIT], [GATHER], [GATHER]),
    Small("gathered, cut and used", "cancel", there_and_used, [SPLIT], [GATHER], [GATHER]),
    Small("cut, written and gathered", "cancel", back_from_what_changed, [ALIKE], [GATHER], [GATHER]),
    Small("sums split", "scatter", averaged_and_split, [(S(1), R)], [REDUCE], [SCATTER]),
    Small("sums split and used", "scatter", averaged_split_and_used, [(S(1), R)], [REDUCE], [REDUCE]),
    Small("cast after", "narrow", cast_after, [SPLIT], [GATHER], [GATHER]),
    Small("cast before", "narrow", cast_before, [SPLIT], [GATHER], [GATHER]),
    Small("added after", "narrow", gathered_and_added, [SPLIT, SPLIT], [GATHER] * 2, [GATHER]),
    Small("cast after and used", "narrow", cast_after_and_used, [SPLIT], [GATHER], [GATHER]),
    Small("added after and used", "narrow", gathered_and_added_and_used, [SPLIT, SPLIT], [GATHER] * 2, [GATHER] * 2),
    Small("two sums", "merge", two_sums, [SPLIT, SPLIT], [REDUCE] * 2, [REDUCE]),
    Small("two gathers", "merge", two_gathers, [SPLIT, SPLIT], [GATHER] * 2, [GATHER]),
    Small("two exchanges", "merge", lambda x, y: (red(x, S(1), R) * 2, red(y, S(1), R) * 3), [SPLIT, SPLIT],
          [EXCHANGE] * 2, [EXCHANGE]),
    Small("a sum of a sum", "merge", a_sum_of_a_sum, [SPLIT, SPLIT], [REDUCE] * 2, [REDUCE] * 2),
    Small("meanwhile", "overlap", gathered_meanwhile, [SPLIT, ALIKE], [GATHER], [GATHER]),
    Small("written meanwhile", "overlap", written_meanwhile, [SPLIT, ALIKE], [GATHER], [GATHER]),
    Small("in place", "in_place", reduced_and_gone, [SPLIT], [REDUCE], [REDUCE]),
    Small("reduced and kept", "in_place", reduced_and_kept, [SPLIT], [REDUCE], [REDUCE]),
    Small("views reduced", "in_place", view_reduced, [SPLIT], [REDUCE] * 2, [REDUCE] * 2),
    Small("given and reduced", "in_place", given_reduced, [(SUM, R)], [REDUCE], [REDUCE]),
]  # fmt: skip


def case_of(name: str) -> Small:
    (found,) = [case for case in SMALL if case.name == name]
    return found


# What passes on request are for


def mlp(x: Any, up: Any, down: Any) -> Any:
    """Rows are gathered before columns, and scattered behind rows."""
    hidden = F.relu(F.linear(red(x, R), up))
    return red(F.linear(hidden, down), S(x.ndim - 2))


def operands(mesh: Any, *shape: int) -> list[Any]:
    """What that block is given: rows, and weights for tensor parallelism."""
    x = whole_numbers(mesh, shape, [S(len(shape) - 2)], 0)
    return [x, whole_numbers(mesh, (12, 4), [S(0)], 1), whole_numbers(mesh, (4, 12), [S(1)], 2)]


def stepped(net: nn.Module, arguments: Callable[[int], Any]) -> Made:
    """A train step of a net."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return (net, optimizer), step, lambda call: (arguments(call),)


def sharded_weights(mesh: Any, layers: int = 3) -> Made:
    """Layers whose weights are sharded along the axis of the batch, and gathered for each product."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for layer in net:
        for name, placement in (("weight", S(0)), ("bias", R)):
            own = getattr(layer, name).detach()
            setattr(layer, name, nn.Parameter(sw.distribute_tensor(own, mesh, [placement])))

    def arguments(call: int) -> Any:
        x = torch.randn(32 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(call))
        return sw.distribute_tensor(x, mesh, [S(0)])

    return stepped(net, arguments)
