"""Run a function on real ranks, one process each, joined by Gloo.

    from launch import run_ranks

    def body(rank, world_size):
        ...                              # torch.distributed is initialised here

    def test_it():
        run_ranks(body, 4)

Starting processes is what costs: `run_cases` runs many functions in one launch, and `on_ranks` (conftest.py) all that a
session of pytest has for one number of ranks. Only the first rank of a launch imports torch itself; the others are
forked from a process that has. So there are two orders of sets, which hash strings anew in each new process: what
depends on them differs between ranks.

Rank and parent talk over one pipe: the rank says that it is ready, then how its body ended, and then keeps its
connections open until it is let go. So a rank that is done early, or has failed, never looks to the others like a
broken network, and what is reported is the cause and not its echo.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Seconds for every rank to start, import torch and meet the others. `timeout` counts only from then on.
STARTUP_TIMEOUT = 50.0
READY, PROGRESS, DONE, FAILED = "ready", "progress", "done", "failed"


def run_ranks(body: Callable[..., object], world_size: int, *args: object, timeout: float = 60) -> None:
    """Call `body(rank, world_size, *args)` on every rank of a new Gloo group; raise AssertionError if any fails.

    `body` must be a top-level function. `timeout` is in seconds, for the bodies only. At the first failure, or when
    the time is up, all ranks are stopped. The error names the ranks and holds their tracebacks.
    """
    __tracebackhide__ = True
    _run(body, world_size, args, timeout, [body])


@dataclass(frozen=True)
class Case:
    """`function(rank, size, *arguments)`, for so many ranks."""

    name: str
    size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name


Outcome = list[tuple[Any, str]] | str
"""What each rank returned, and its traceback if it failed; or what stopped all of them."""


def run_cases(cases: Sequence[Case], timeout: float = 60) -> dict[str, Outcome]:
    """What comes of cases that are for the same number of ranks, by name. They run one after the other in one launch;
    `timeout` is for each. One that does not end takes its launch with it, and the rest has another."""
    outcomes: dict[str, Outcome] = {}
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory(prefix="cases-") as folder:
            problem = ""
            try:
                _run(_each, left[0].size, (folder, left), timeout, [_each, *(case.function for case in left)])
            except AssertionError as error:
                problem = str(error)
            files = {case.name: Path(folder, str(number)) for number, case in enumerate(left)}
            outcomes |= {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}
        if problem:
            stopped = [case.name for case in left if case.name not in outcomes] or [left[-1].name]
            outcomes[stopped[0]] = problem
        left = [case for case in left if case.name not in outcomes]
        assert problem or not left
    return outcomes


def _run(
    body: Callable[..., object],
    world_size: int,
    args: tuple[object, ...],
    timeout: float,
    functions: Sequence[Callable[..., object]],
) -> None:
    """`functions` are those that the ranks must find; `timeout` is for the longest time without a word from them."""
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            world_size=world_size,
            timeout=STARTUP_TIMEOUT + timeout,
            folder=folder,
            call=_pickled_call(body, args),
            import_roots=tuple(dict.fromkeys(map(_import_root, functions))),
            warning_filters=pickle.dumps(warnings.filters),
        )
        with _started(job) as ranks:
            problem = (
                _await(ranks, READY, STARTUP_TIMEOUT, "start")
                or _await(ranks, DONE, timeout, "finish")
                or _let_go(ranks)
            )
            if problem:
                _stop(ranks)
                raise AssertionError(_report(body, ranks, problem))


# ---------------------------------------------------------------------------------------------- in the parent


@dataclass
class _Rank:
    index: int
    process: BaseProcess
    pipe: connection.Connection
    stack_file: Path
    heard: set[str] = field(default_factory=set)
    failure: str | None = None

    def listen(self) -> None:
        """Take what the rank has said so far, and notice if it is gone."""
        try:
            while self.pipe.poll():
                word, text = self.pipe.recv()
                self.heard.add(word)
                self.failure = self.failure or text
        except (EOFError, ConnectionError):
            self.process.join()
            if DONE not in self.heard:
                self.heard.add(DONE)
                self.failure = f"the process ended without a word, exit code {_exit_code(self.process)}"


@contextmanager
def _started(job: _Job) -> Iterator[list[_Rank]]:
    """The processes, one per rank; none is left when the block ends."""
    ranks: list[_Rank] = []
    try:
        for index in range(job.world_size):
            context: Any = get_context("spawn" if index == 0 or torch.cuda.is_available() else "forkserver")
            context.set_forkserver_preload(["torch._dynamo", "numpy", "pytest", "shardwise"])
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(index, job, theirs), name=f"rank {index}", daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(index, process, ours, job.stack_file(index)))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()


def _pickled_call(body: Callable[..., object], args: tuple[object, ...]) -> bytes:
    if "<locals>" in body.__qualname__:
        raise TypeError(f"run_ranks: {body.__qualname__} must be a top-level function, so that a new process finds it")
    return pickle.dumps((body, args))


def _import_root(body: Callable[..., object]) -> str:
    """The folder to import the module of `body` from: pytest may have loaded it without one on sys.path."""
    file = Path(sys.modules[body.__module__].__file__ or "").resolve()
    return str(file.parents[body.__module__.count(".")])


def _await(ranks: list[_Rank], word: str, timeout: float, what: str) -> str | None:
    """Wait until every rank has said `word`; otherwise say what went wrong."""
    deadline = time.monotonic() + timeout
    while True:
        if any(rank.failure for rank in ranks):
            return FAILED
        missing = [rank for rank in ranks if word not in rank.heard]
        if not missing:
            return None
        heard = connection.wait([rank.pipe for rank in missing], max(0.0, deadline - time.monotonic()))
        if not heard:
            return f"{_names(missing)} did not {what} within {timeout:g} s"
        deadline = time.monotonic() + timeout
        for rank in missing:
            if rank.pipe in heard:
                rank.listen()


def _let_go(ranks: list[_Rank]) -> str | None:
    """Let the ranks leave the group and end; say so if one cannot."""
    for rank in ranks:
        with suppress(ConnectionError):  # gone already: its exit code says why
            rank.pipe.send(None)
    deadline = time.monotonic() + STARTUP_TIMEOUT
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank in ranks if rank.process.exitcode is None]
    if stuck:
        return f"{_names(stuck)} did not leave the process group within {STARTUP_TIMEOUT:g} s"
    broken = [rank for rank in ranks if rank.process.exitcode]
    for rank in broken:
        rank.failure = f"leaving the process group failed, exit code {_exit_code(rank.process)}"
    return FAILED if broken else None


def _stop(ranks: list[_Rank]) -> None:
    """End all processes. On SIGTERM each first writes down where it was."""
    for rank in ranks:
        rank.listen()
        rank.process.terminate()
    deadline = time.monotonic() + 5
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        rank.process.kill()


def _report(body: Callable[..., object], ranks: list[_Rank], problem: str) -> str:
    failed = [rank for rank in ranks if rank.failure]
    unfinished = [rank for rank in ranks if DONE not in rank.heard]
    if failed:
        problem = f"{_names(failed)} failed"
    lines = [f"{body.__qualname__} on {len(ranks)} ranks: {problem}"]
    for rank in failed:
        lines += [f"--- rank {rank.index} failed:", (rank.failure or "").rstrip()]
    if failed and unfinished:
        lines += [f"--- {_names(unfinished)} had not finished and had to be stopped"]
    elif not failed:
        for rank in unfinished or ranks:
            stack = rank.stack_file.read_text().strip() if rank.stack_file.exists() else ""
            lines += [f"--- rank {rank.index} was stopped here:", stack or "(it left no stack)"]
    return "\n".join(lines)


def _names(ranks: list[_Rank]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank.index) for rank in ranks)


def _exit_code(process: BaseProcess) -> str:
    code = process.exitcode
    return f"{code} ({signal.Signals(-code).name})" if code is not None and code < 0 else str(code)


# ------------------------------------------------------------------------------------------------- in a rank


@dataclass(frozen=True)
class _Job:
    world_size: int
    timeout: float  # of a collective: longer than the parent's patience, but finite in case the parent is gone
    folder: str
    call: bytes
    import_roots: tuple[str, ...]
    warning_filters: bytes

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}")


_parent: connection.Connection


def _each(rank: int, world_size: int, folder: str, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        torch.manual_seed(0)
        result, error = None, ""
        try:
            result = case.function(rank, world_size, *case.arguments)
        except Exception:
            error = traceback.format_exc()
        # A rank that fails while others wait for it never gets past this line; the launcher then stops them all.
        outcome: Any = [None] * world_size
        dist.all_gather_object(outcome, (result, error))
        if rank == 0:
            Path(folder, str(number)).write_bytes(pickle.dumps(outcome))
        _parent.send((PROGRESS, None))


def _rank_main(rank: int, job: _Job, pipe: connection.Connection) -> None:
    global _parent
    _parent = pipe
    with open(job.stack_file(rank), "w") as stack_file:
        faulthandler.register(signal.SIGTERM, file=stack_file, chain=True)
        try:
            body, args = _prepare(rank, job)
            pipe.send((READY, None))
            body(rank, job.world_size, *args)
        except BaseException:  # also what pytest.fail and sys.exit raise
            pipe.send((DONE, traceback.format_exc()))
        else:
            pipe.send((DONE, None))
        pipe.recv()
        dist.destroy_process_group()


def _prepare(rank: int, job: _Job) -> tuple[Callable[..., object], tuple[Any, ...]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.world_size)
    timeout = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    sys.path += [root for root in job.import_roots if root not in sys.path]
    body, args = pickle.loads(job.call)
    _set_warning_filters(pickle.loads(job.warning_filters))
    return body, args


def _set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    """Treat warnings as the test that started us does: where they are errors there, they are errors here."""
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), lineno)


def _pattern(regex: Any) -> str:
    return getattr(regex, "pattern", regex) or ""
