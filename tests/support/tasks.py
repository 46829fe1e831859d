"""Tasks for tests of `shardwise.proof.pool`; its processes import them from here."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


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
