"""Process groups without processes: torch's group of threads, and one written in Python that has only some methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it, and looks there to destroy a group
    threaded.ThreadLocalWorld.comms = []


def run_threads(body: Callable[[int], Any], world_size: int) -> list[Any]:
    """`body(rank)` on every rank of a new group, each a thread; what they return, in order."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    causes = [error for error in errors if not isinstance(error, SystemExit)]  # the others were only told to stop
    if causes:
        raise causes[0]
    assert not stuck, f"ranks {stuck} are stuck"
    return results


@contextmanager
def alone_in(group: type, world_size: int = 2, **kwargs: Any) -> Iterator[Any]:
    """Inside, this process is rank 0 of a group of a class written in Python."""
    made: list[Any] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(group(rank, size, **kwargs))
        return made[-1]

    dist.Backend.register_backend("python", create, devices=["cpu"])
    dist.init_process_group("python", rank=0, world_size=world_size, store=dist.HashStore())
    try:
        yield made
    finally:
        dist.destroy_process_group()
        _forget_backend("python")


def _forget_backend(name: str) -> None:
    backend: Any = dist.Backend
    backend._plugins.pop(name.upper(), None)
    backend.backend_list.remove(name)
    backend.backend_type_map.pop(name, None)
    for device, known in list(backend.default_device_backend_map.items()):
        if known == name:
            del backend.default_device_backend_map[device]
    delattr(backend, name.upper())


class Told:
    """Work that is complete when somebody says so: `wait` before that is an error, so that nothing depends on time."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish, self.told, self.num_waits = finish, False, 0

    def tell(self) -> None:
        self.told = True

    def wait(self, timeout: Any = None) -> bool:
        self.num_waits += 1
        assert self.told, "waited for before it was complete"
        if self.num_waits == 1:
            self.finish()
        return True


class Mirror(dist.ProcessGroup):
    """A group all of whose ranks bring what rank 0 does. It communicates by lists only, as a group may."""

    def __init__(self, rank: int, size: int, *, told: bool = True) -> None:
        super().__init__(rank, size)
        self.num_ranks, self.at_once = size, told
        self.works: list[Told] = []
        self.calls: list[str] = []

    def size(self) -> int:
        return self.num_ranks

    def getBackendName(self) -> str:
        return "mirror"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _start(self, name: str, finish: Callable[[], Any]) -> Told:
        self.calls.append(name)
        self.works.append(Told(finish))
        if self.at_once:
            self.works[-1].tell()
        return self.works[-1]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Told:
        (x,) = tensors
        extremum = options.reduceOp in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        return self._start("allreduce", partial(x.mul_, 1 if extremum else self.num_ranks))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Told:
        return self._start("allgather", lambda: [out.copy_(inputs[0]) for out in outputs[0]])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Told:
        return self._start("alltoall", lambda: [out.copy_(inputs[0]) for out in outputs])
