"""Tasks for tests of `shardwise.proof.kit.pool`; its processes import them from here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.proof.fuzz.command import Result


def misbehave(name: str, settings: Any) -> Iterator[Any]:
    """Gives two parts, and before the second does what its name says."""
    yield (name, settings)
    match name:
        case "hang":
            threading.Event().wait()
        case "die":
            os._exit(7)
        case "interrupt":  # as a terminal would
            os.kill(os.getpid(), signal.SIGINT)
        case "fail":
            raise ValueError("what a pity")
    yield "more"


def be_a_parent(name: str, pipe: Path) -> Iterator[Any]:
    """Starts a process that holds a pipe open and waits for ever, and then hangs or dies."""
    holding = f"held = open({str(pipe)!r}, 'w'); print(flush=True); import threading; threading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    yield "started"
    if name == "die":
        os._exit(7)
    child.wait()


def count_down(name: str, settings: Any) -> Iterator[Any]:
    """A program of `fuzz`, of which some end the process: 3 before it is drawn, 5 after that."""
    if name == "0:3":
        os._exit(1)
    yield Result(name, calls=1)
    if name == "0:5":
        os._exit(1)
    yield Result(name, "right")
