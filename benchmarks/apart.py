"""Calls in processes of their own, timed beside each other: what each has to compile, they compile side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from race import Call, Clock

Made = tuple[Call, Clock, Any]
"""A call, how it is timed, and what else there is to say of it."""


class Apart:
    """A call in a process of its own, that `make(*args)` makes there."""

    def __init__(self, make: Callable[..., Made], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=False)
        self._process.start()
        theirs.close()

    def wait(self, until: float) -> Any:
        """What else there is to say of the call, once it can be made. Raises RuntimeError if it cannot."""
        if not self._pipe.poll(max(0.0, until - time.monotonic())):
            raise RuntimeError("was not ready in time")
        return self._received()

    def __call__(self) -> None:
        self.seconds(0)

    def seconds(self, num_calls: int) -> float:
        """Per call; of none, one is made and not timed."""
        self._pipe.send(num_calls)
        return self._received()

    def _received(self) -> Any:
        try:
            found, error = self._pipe.recv()
        except EOFError:
            found, error = None, "its process has ended"
        if error is not None:
            raise RuntimeError(error)
        return found

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def clock_apart(call: Any, num_calls: int) -> float:
    """Seconds per call of an `Apart`, as its process measures them."""
    return call.seconds(num_calls)


def _serve(pipe: Connection, make: Callable[..., Made], args: tuple[Any, ...]) -> None:
    try:
        call, clock, said = make(*args)
        pipe.send((said, None))
        while True:
            if num_calls := pipe.recv():
                pipe.send((clock(call, num_calls), None))
            else:
                call()
                pipe.send((None, None))
    except EOFError:
        pass  # nobody asks any more
    except Exception as error:  # whatever a system under test raises
        pipe.send((None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"))
