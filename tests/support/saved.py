"""What a program keeps in memory: what autograd saves for the backward pass, and the peak.

Shardwise is measured on one rank of a fake process group, which holds real shards, beside plain torch on tensors of the
sizes that this rank has.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(*shape: int, names: tuple[str, ...], device: str = "cpu", rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh as one of its ranks sees it; the other ranks do not exist, and what they send is made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
    try:
        yield init_device_mesh(device, shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Memory:
    """`saved`: the sizes in bytes of the distinct storages that autograd saved, and how often each occurs. `kept`: the
    bytes that the program leaves allocated, its result included, and so what anybody else holds on to as well. `peak`:
    the most that the program and its backward pass had allocated at a time. Both count from where the program began."""

    saved: Counter[int]
    kept: int
    peak: int

    @property
    def saved_bytes(self) -> int:
        return sum(size * count for size, count in self.saved.items())


def measure(program: Callable[[], Tensor], device: str = "cpu") -> Memory:
    """Runs a program and the backward pass of its result; once before, when calls are planned and gradients made."""
    step(program)
    saved = saved_by(program)
    allocated = on_cuda if torch.device(device).type == "cuda" else on_cpu
    kept, _ = allocated(program)
    _, peak = allocated(lambda: step(program))
    return Memory(saved, kept, peak)


def step(program: Callable[[], Tensor]) -> None:
    result = program()
    result.backward(torch.ones_like(result))


def saved_by(program: Callable[[], Tensor]) -> Counter[int]:
    """Parameters and inputs that are needed again count as everything else does: while the graph lives, so do they."""
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        result = program()  # which keeps all of them alive, so that no address is met twice
    del result
    return Counter(storages.values())


# How much is allocated: after a program has run, while its result is there, and at most


def on_cuda(program: Callable[[], Any]) -> tuple[int, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = program()
    torch.cuda.synchronize()
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del result
    return after - before, peak - before


def on_cpu(program: Callable[[], Any]) -> tuple[int, int]:
    """The CPU's allocator keeps no statistics, but tells the profiler what it does."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = program()
    del result
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = list(_allocations(results.experimental_event_tree()))
    if not events:
        return 0, 0
    first = min(events, key=lambda event: event.start_time_ns).extra_fields
    before = first.total_allocated - first.alloc_size
    peak = max(event.extra_fields.total_allocated for event in events) - before
    return sum(event.extra_fields.alloc_size for event in events), max(peak, 0)


def _allocations(tree: Iterable[Any]) -> Iterator[Any]:
    for event in tree:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)
