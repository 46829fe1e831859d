"""Calls of the classes that torch writes in C++: `torch.FloatTensor(x)` and all of its kin.

These classes have one metaclass between them, `torch.tensortype`, and a call of any of them is a call of its
`__call__`. It is a static type, which Python declines to change, and all that keeps it so is one of its flags. The
flag is taken away while `__call__` is set: Python then does what it does for a class of its own (slots and caches
follow), and the flag is put back. So the classes remain the very objects they were, for all that goes by identity:
isinstance, pickles and checkpoints, TorchScript's annotations, the tables of torch.compile, and the functions in C++
that want the real one (`x.type(...)`, `set_default_tensor_type`). Rejected: classes of ours under the same names, for
which each of these would have to be taught that they are the same.

The flags lie where every CPython has them. What lies there is compared with what Python says before it is changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

IMMUTABLE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE."""

FLAGS_AT = object.__basicsize__ + 19 * ctypes.sizeof(ctypes.c_void_p)
"""Where a type keeps its flags: behind what every object has, its `ob_size`, and 18 slots of one word each."""


def watch_calls(metaclass: type, call: Callable[..., Any]) -> None:
    """From now on `call(cls, *args, **kwargs)` makes what a call of a class of this metaclass gives."""
    with _mutable(metaclass):
        metaclass.__call__ = call  # type: ignore[method-assign]


@contextmanager
def _mutable(cls: type) -> Iterator[None]:
    if not cls.__flags__ & IMMUTABLE:
        yield
        return
    flags = ctypes.c_ulong.from_address(id(cls) + FLAGS_AT)
    if flags.value != cls.__flags__:
        raise NotImplementedError("the flags of types do not lie where they lie in CPython")
    flags.value &= ~IMMUTABLE
    try:
        yield
    finally:
        flags.value |= IMMUTABLE  # the others as Python left them: some are of what it keeps in its caches
