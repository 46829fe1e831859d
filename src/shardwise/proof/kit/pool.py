"""Many long tasks on a few processes, each of which may hang or crash without taking the others along."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

Task = Callable[[str, Any], Iterator[Any]]
"""A task gets a name and the settings, and yields parts of its result as it has them."""

_READY, _PART, _DONE = "ready", "part", "done"

START = 300.0
"""Seconds a process may take to import what it needs."""


@dataclass
class Outcome:
    """What a task gave: its parts so far, and what ended it early, if anything did."""

    name: str
    parts: list[Any] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0


def run_all(task: Task, names: Sequence[str], settings: Any, *, jobs: int, timeout: float) -> Generator[Outcome]:
    """Run a task for every name; outcomes come as they are done.

    `jobs` processes share the work; 0 does all of it in this process. A process that gives no part of a result for
    `timeout` seconds is ended, and what it was at counts as failed.
    """
    if not jobs:
        for name in names:
            began = time.monotonic()
            yield Outcome(name, list(task(name, settings)), seconds=time.monotonic() - began)
        return
    left = list(reversed(names))
    workers = [_Worker(task, settings) for _ in range(min(jobs, len(names)))]
    try:
        for worker in workers:
            worker.begin(left.pop())
        while any(worker.outcome for worker in workers):
            ready = wait([worker.connection for worker in workers if worker.outcome], timeout=1.0)
            for worker in workers:
                if worker.outcome is None:
                    continue
                done = worker.receive() if worker.connection in ready else worker.check(timeout)
                if done is not None:
                    yield done
                    if left:
                        worker.begin(left.pop())
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that does one task after the other, and is started again when it dies."""

    def __init__(self, task: Task, settings: Any) -> None:
        self.task, self.settings = task, settings
        self.outcome: Outcome | None = None
        self.ready = False
        self.began = self.heard = 0.0
        self.process: Any = None
        self.connection: Connection

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.task, self.settings))
        with deaf():
            self.process.start()
        self.ready = False
        theirs.close()

    def begin(self, name: str) -> None:
        if self.process is None:
            self.start()
        self.outcome = Outcome(name)
        self.began = self.heard = time.monotonic()
        self.connection.send(name)

    def receive(self) -> Outcome | None:
        """Take one message; the outcome if it is complete."""
        assert self.outcome is not None
        self.heard = time.monotonic()
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return self.give_up(f"its process died (exit code {self.process.exitcode})")
        if kind == _DONE:
            return self.finish(content)
        if kind == _PART:
            self.outcome.parts.append(content)
        self.ready = True
        return None

    def check(self, timeout: float) -> Outcome | None:
        if time.monotonic() - self.heard <= (timeout if self.ready else START):
            return None
        return self.give_up(f"timed out: nothing heard for {timeout:g} s")

    def give_up(self, why: str) -> Outcome:
        self.end()
        return self.finish(why)

    def finish(self, failure: str | None) -> Outcome:
        assert self.outcome is not None
        done, self.outcome = self.outcome, None
        done.failure, done.seconds = failure, time.monotonic() - self.began
        return done

    def end(self) -> None:
        """End the process, and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):  # none is left, or it has not come as far as to lead a group
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


@contextmanager
def deaf() -> Iterator[None]:
    """Processes started here do not hear a terminal's interrupt, which it sends to all: this one ends the others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, task: Task, settings: Any) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    connection.send((_READY, None))
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        failure = None
        try:
            for part in task(name, settings):
                connection.send((_PART, part))
        except Exception as error:  # a fault of the task itself: told, not hidden
            failure = f"{type(error).__name__}: {error}"
        connection.send((_DONE, failure))
