"""Saving that goes on while the program does: at most one at a time, whose error is raised where it is waited for."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shardwise.comm import Handle
from shardwise.comm.process_group import wait_for_at_the_end


class Saving:
    """A step that is being saved, or has been."""

    def __init__(self, save: Callable[[], Path]) -> None:
        self._save: Callable[[], Path] | None = save
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._joined: Handle | None = None  # for who destroys the groups that are talked through

    @property
    def is_done(self) -> bool:
        """Whether it is over; if it has failed, `wait` says so."""
        return self._save is None

    def wait(self) -> Path:
        """The folder of the step, once it is complete. What went wrong is raised here, once."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._path is None:
            raise RuntimeError("this step was not saved, as was said before")
        return self._path

    def _run(self) -> None:
        assert self._save is not None
        try:
            self._path = self._save()
        except BaseException as error:
            self._error = error
        finally:
            self._save = None  # lets go of the copies


_last: Saving | None = None


def started(save: Callable[[], Path], *, background: bool) -> Saving:
    """Save now, or begin to. Whatever was saved before must be over (`wait`)."""
    global _last
    saving = _last = Saving(save)
    if background:
        saving._thread = threading.Thread(target=saving._run, name="shardwise-save")
        saving._thread.start()
        if dist.is_initialized():
            saving._joined = Handle(saving._thread.join)
            wait_for_at_the_end(saving._joined)
    else:
        saving._run()
        saving.wait()
    return saving


def wait() -> None:
    """Wait for a step that is being saved in the background, and raise what went wrong with it, if that was not yet."""
    global _last
    last, _last = _last, None
    if last is not None and (last._error is not None or not last.is_done):
        last.wait()


@atexit.register
def _say_what_failed() -> None:
    """A program that never asks is told at its end."""
    if _last is not None and _last._error is not None:
        error = _last._error
        sys.excepthook(type(error), error, error.__traceback__)
