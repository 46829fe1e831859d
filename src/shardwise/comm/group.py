"""A process group as it is asked to communicate flat, contiguous tensors of a dtype that it knows.

Groups may be written in Python, and implement as much as torch.distributed's own functions ask of them, or only a part
of it. So each collective has several ways, the best one first; a group takes the first that it implements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from shardwise.comm.wire import in_units, lent, movable
from shardwise.errors import MeshError

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _options(kind: type, *, awaited: bool, **fields: Any) -> Any:
    """Options of a collective. One that we wait for at once NCCL runs on the current stream, not beside it."""
    options = kind()
    options.asyncOp = not awaited
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _both(kind: type, **fields: Any) -> dict[bool, Any]:
    return {awaited: _options(kind, awaited=awaited, **fields) for awaited in (False, True)}


ALL_REDUCE = {op: _both(AllreduceOptions, reduceOp=reduce) for op, reduce in _REDUCE.items()}
"""By operator, and by whether the collective is waited for at once."""

_REDUCE_SCATTER = {op: _both(ReduceScatterOptions, reduceOp=reduce) for op, reduce in _REDUCE.items()}
_ALL_GATHER = _both(AllgatherOptions)
_ALL_TO_ALL = _both(AllToAllOptions)

Work = Callable[[], Any]
"""Waits for a collective."""

_T = TypeVar("_T")
Result = Callable[[], _T]
"""Waits for a collective, and gives what it brings."""


def _work(started: Any) -> Work:
    """How to wait for what a group started. One that has waited already may return nothing."""
    return started.wait if started is not None else lambda: None


def _giving(out: Tensor, wait: Work) -> Result[Tensor]:
    def finish() -> Tensor:
        wait()
        return out

    return finish


class Group:
    """A process group and the order in which its ranks number the members we mean."""

    __slots__ = ("me", "order", "process_group", "size")

    def __init__(self, process_group: Any, ranks: list[int]) -> None:
        """`ranks` are the members' global ranks, in the row-major order of the axes."""
        self.process_group = process_group
        self.size = len(ranks)
        self.me = ranks.index(dist.get_rank())
        numbers = [dist.get_group_rank(process_group, rank) for rank in ranks]
        in_order = sorted(range(len(ranks)), key=numbers.__getitem__)
        self.order = None if in_order == list(range(len(ranks))) else in_order

    def to_group(self, items: Sequence[Any]) -> Sequence[Any]:
        return items if self.order is None else [items[i] for i in self.order]

    def from_group(self, items: Sequence[Any]) -> list[Any]:
        if self.order is None:
            return list(items)
        placed: list[Any] = [None] * self.size
        for position, index in enumerate(self.order):
            placed[index] = items[position]
        return placed

    def number(self, member: int) -> int:
        """The group's number of one of our members."""
        return member if self.order is None else self.order.index(member)

    def reducer(self, device: torch.device) -> Callable[[list[Tensor], Any], Any]:
        """What reduces tensors of a device in place, behind autograd's back, as directly as can be: torch's dispatcher
        would look the backend up for each call, and groups in Python may compute with what they are given."""
        if _is_in_python(self.process_group):
            return lambda tensors, options: self.process_group.allreduce([lent(x) for x in tensors], options)
        try:
            return self.process_group._get_backend(device).allreduce
        except RuntimeError:  # torch's own way knows what to say of it
            return self.process_group.allreduce

    # Collectives: each is started, and returns what waits for it and gives the result

    def own(self, x: Tensor) -> Tensor:
        """A contiguous tensor of these values that a collective may write to."""
        return x.clone(memory_format=torch.contiguous_format)

    def all_reduce(self, x: Tensor, op: str, awaited: bool) -> Result[Tensor]:
        """`x`, which is our own, becomes the reduction."""
        sent = lent(x)
        return _giving(x, self._first("all_reduce", x, allreduce=lambda run: run([sent], ALL_REDUCE[op][awaited])))

    def all_gather(self, x: Tensor, awaited: bool) -> Result[Tensor]:
        """Every member's flat `x`, one after the other."""
        out, options = x.new_empty(self.size * x.numel()), _ALL_GATHER[awaited]
        landing, sent = movable(out), movable(x)
        work = self._first(
            "all_gather",
            sent,
            all_gather_single=lambda run: run(landing, sent, options),
            _allgather_base=lambda run: run(landing, sent, options),
            allgather=lambda run: run([list(landing.chunk(self.size))], [sent], options),
        )
        return _giving(out, work)

    def reduce_scatter(self, x: Tensor, op: str, awaited: bool) -> Result[Tensor]:
        """Our part, along the first dim, of the reduction of every member's `x`, which is not written to."""
        out, options = x.new_empty((len(x) // self.size, *x.shape[1:])), _REDUCE_SCATTER[op][awaited]
        work = self._first(
            "reduce_scatter",
            x,
            reduce_scatter_single=lambda run: run(out, x, options),
            _reduce_scatter_base=lambda run: run(out, x, options),
            reduce_scatter=lambda run: run([out], [list(x.chunk(self.size))], options),
            allreduce=lambda run: self._reduced_whole(run, x.clone(), out, ALL_REDUCE[op][awaited]),
        )
        return _giving(out, work)

    def _reduced_whole(self, run: Callable[..., Any], x: Tensor, out: Tensor, options: Any) -> _Then:
        return _Then(run([x], options), lambda: out.copy_(x.chunk(self.size)[self.number(self.me)]))

    def all_to_all(self, x: Tensor, receive: list[int], send: list[int], awaited: bool) -> Result[Tensor]:
        """The parts that all members have for us, of the sizes `receive`, for the parts of the flat `x`."""
        out, options = x.new_empty(sum(receive)), _ALL_TO_ALL[awaited]
        landing, sent, receive, send = movable(out), movable(x), in_units(receive, x), in_units(send, x)
        work = self._first(
            "all_to_all",
            sent,
            all_to_all_single=lambda run: run(landing, sent, receive, send, options),
            alltoall_base=lambda run: run(landing, sent, receive, send, options),
            alltoall=lambda run: run(list(landing.split(receive)), list(sent.split(send)), options),
        )
        return _giving(out, work)

    def broadcast(self, x: Tensor, source: int, awaited: bool) -> Result[Tensor]:
        """`x`, which is our own, becomes that of the member numbered `source`."""
        root, sent = self.number(source), lent(movable(x.view(-1)))
        work = self._first(
            "broadcast",
            sent,
            broadcast=lambda run: run([sent], _options(BroadcastOptions, awaited=awaited, rootRank=root)),
            allreduce=lambda run: run([sent if source == self.me else sent.zero_()], ALL_REDUCE["sum"][awaited]),
        )
        return _giving(x, work)

    def _first(self, collective: str, x: Tensor, **ways: Callable[[Any], Any]) -> Work:
        """Start a collective in the first way that the group has; what it refuses to do, it may do in another."""
        for name, start in ways.items():
            if _implements(self.process_group, name, x.device):
                try:
                    return _work(start(getattr(self.process_group, name)))
                except NotImplementedError:
                    continue
        raise MeshError(
            f"{type(self.process_group).__name__} cannot {collective.replace('_', '-')} {x.dtype} tensors on "
            f"{x.device.type}: it would need one of the methods {', '.join(ways)}"
        )


class _Then:
    """Work, and what is to be done after it."""

    def __init__(self, started: Any, after: Callable[[], object]) -> None:
        self.before, self.after = _work(started), after

    def wait(self) -> None:
        self.before()
        self.after()


def _is_in_python(process_group: Any) -> bool:
    return type(process_group) is not dist.ProcessGroup


def _implements(process_group: Any, name: str, device: torch.device) -> bool:
    """Whether a group has a method: torch's own ones have all, those of one in Python count where it defines them, or
    has given itself a backend that does."""
    if not _is_in_python(process_group):
        return hasattr(process_group, name)
    for cls in type(process_group).__mro__:
        if cls is dist.ProcessGroup:
            return _has_backend(process_group, device) and hasattr(process_group, name)
        if name in vars(cls):
            return True
    return name in getattr(process_group, "__dict__", ())


def _has_backend(process_group: Any, device: torch.device) -> bool:
    try:
        return process_group._get_backend(device) is not None
    except (RuntimeError, TypeError):
        return False
