"""What a call costs on the device it runs on: time, memory and kernels."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from race import Call, Clock, time_per_call


def clock_of(device: torch.device) -> Clock:
    """On CUDA, between two events. What ran before is not waited for: so long as the host keeps ahead the device is
    never idle, and this is its time; where the host cannot, the host's."""
    return _between_events if device.type == "cuda" else time_per_call


def _between_events(call: Call, num_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / num_calls


def host_seconds(call: Call, num_calls: int) -> float:
    """Until the host is done with a call, whether or not the device is."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    seconds = (time.perf_counter() - start) / num_calls
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds


# --- Memory ---


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a program had before it ran, and the most it had while it did, those included."""

    state: int
    peak: int

    @property
    def work(self) -> int:
        return self.peak - self.state


def measure_memory(start: Callable[[], tuple[Call, Call]]) -> Memory:
    """Of a program that `start` makes, together with all that it needs, and of a call that makes it forget what its
    last run left. Nothing else may be allocated meanwhile. CUDA only: no other allocator keeps count."""
    base = _allocated()
    program, forget = start()
    for _ in range(3):  # until calls are planned, and states and workspaces made
        program()
    forget()
    state = _allocated()
    torch.cuda.reset_peak_memory_stats()
    program()
    torch.cuda.synchronize()
    return Memory(state - base, torch.cuda.max_memory_allocated() - base)


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# --- Kernels ---


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How often each kernel ran, and for how many seconds in all. On the CPU, each op of torch's."""

    counts: Counter[str]
    seconds: Counter[str]


def kernels_of(call: Call, device: torch.device) -> Kernels:
    on_cuda = device.type == "cuda"
    for _ in range(3):
        call()
    if on_cuda:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    counts, seconds = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type != (DeviceType.CUDA if on_cuda else DeviceType.CPU):
            continue
        if getattr(event, "is_user_annotation", False) or not (on_cuda or event.name.startswith("aten::")):
            continue
        counts[event.name] += 1
        seconds[event.name] += (event.self_device_time_total if on_cuda else event.self_cpu_time_total) * 1e-6
    return Kernels(counts, seconds)
