"""Why something is communicated: the user's line, the function called there, the argument that moves, and where to.

While nobody listens, nothing here runs. While somebody does, whoever runs a call or a path of moves says so (`called`,
`moved`), and the nodes that autograd makes meanwhile remember it: that line causes what their backward communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

listeners: list[Any] = []
"""Who listens for collectives: lists to which each is appended. A plain list, not a ContextVar: on accelerators the
backward pass, and the collectives in it, run on other threads."""

watchers: list[object] = []
"""Who watches calls: who listens, and who limits what they may move."""

ASKED = "asked for"
CONFLICT = "operands in conflict"
INSIDE = "inside the function"
NEEDED = "needed in another layout"
NO_RULE = "no rule"
OF_REPLICATED = "gradient of a replicated tensor used on shards"
UNSEEN = "gradient of a move made while nobody listened"

Path = tuple[Any, ...]
"""Moves, one after the other (`redistribute.Move`)."""

_T = TypeVar("_T")
_disabled = torch._C.DisableTorchFunctionSubclass
_graph_task = torch._C._current_graph_task_id
_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_KEY = "shardwise.cause"


@dataclass(frozen=True, slots=True)
class Cause:
    """What a collective is for. `path` are the moves that it is one of, if it is; `why` is of the forward pass."""

    file: str
    line: int
    function: str
    argument: str
    why: str
    path: Path


class Call(Protocol):
    """A torch function that runs on shards."""

    function: str

    def explain(self, path: Path, x: Tensor | None) -> tuple[str, str]:
        """Which argument moves when `x` is taken along a path, and why."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """What runs now, in the forward pass or in one backward pass."""

    call: Call | None
    path: Path
    x: Tensor | None
    task: int


_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)
_gradient: ContextVar[tuple[Cause | None] | None] = ContextVar("gradient", default=None)
_unplanned: ContextVar[Any] = ContextVar("unplanned", default=None)
"""The outermost torch function that runs without a plan: a value leaves for Python, say."""


def calling() -> Call | None:
    """The call that runs now."""
    scope = _current()
    return None if scope is None else scope.call


def is_moving(path: Sequence[Any]) -> bool:
    """Whether it was already said that something is taken along this path."""
    scope = _current()
    return scope is not None and scope.path is path


def called(call: Call, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """`run()`, which is a call with these tensors."""
    return _observed(_Scope(call, (), None, _graph_task()), tensors, run)


@dataclass(slots=True)
class _Service:
    """What communicates, but is no torch function: a gather of parameters, say."""

    function: str
    why: str

    def explain(self, path: Path, x: Tensor | None) -> tuple[str, str]:
        return "", self.why


def caused(function: str, why: str, run: Callable[[], _T]) -> _T:
    """`run()`, which is part of something that is no torch function."""
    return called(_Service(function, why), (), run) if listeners else run()


def without_plan(func: Any, run: Callable[[], Any]) -> Any:
    """`run()`, which is a torch function that has no plan."""
    token = _unplanned.set(_unplanned.get() or func)
    try:
        return run()
    finally:
        _unplanned.reset(token)


def moved(path: Sequence[Any], x: Tensor, run: Callable[[], Any], *others: Tensor) -> Any:
    """`run()`, which takes a tensor along a path, and others with it."""
    return _observed(_Scope(calling(), path, x, _graph_task()), (x, *others), run)  # type: ignore[arg-type]


def _observed(scope: _Scope, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    known = _nodes(tensors) if listeners else []
    token = _scope.set(scope)
    try:
        out = run()
        if listeners:
            _mark(_nodes(_tensors(out)), set(known))
        return out
    finally:
        _scope.reset(token)


def inherited(out: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """What a backward pass makes of gradients, to be differentiated itself, has the cause of the node that makes it."""
    _mark(_nodes(out), set(_nodes(grads)))


def mark_again(node: Any) -> None:
    """A node that was there before, and now stands for what runs as well."""
    node.metadata[_KEY] = cause()[0]


def handed_on(x: Tensor, out: Sequence[Tensor], path: Path) -> None:
    """The same values as those of `x`, whose gradient goes another way: what caused `x` causes that."""
    node = _nodes((x,))[0]
    why: Cause | None = cause()[0] if node is None else node.metadata.get(_KEY)
    if why is not None:
        for node in _nodes(out):
            node.metadata[_KEY] = replace(why, path=path)


@contextmanager
def gradient_of(why: Cause | None, count: int) -> Iterator[None]:
    """Inside, what is communicated moves the gradient of something, and of others, `count` in all."""
    others = f" and {count - 1} other{'s' if count > 2 else ''}" if count > 1 else ""
    token = _gradient.set((why and replace(why, argument=f"{why.argument}{others}"),))
    try:
        yield
    finally:
        _gradient.reset(token)


def in_backward() -> bool:
    return _gradient.get() is not None or _graph_task() != -1


def cause() -> tuple[Cause | None, bool]:
    """What something communicated now is for, and whether it moves the gradient of that."""
    if (known := _gradient.get()) is not None:
        return known[0], True
    scope = _current()
    if scope is not None:
        return _cause_of(scope), False
    if _graph_task() != -1:
        node: Any = torch._C._current_autograd_node()
        return (None if node is None else node.metadata.get(_KEY)), True
    return _cause_of(_Scope(None, (), None, -1)), False


def _current() -> _Scope | None:
    """What runs now. A backward pass begun inside of a call has causes of its own."""
    scope = _scope.get()
    return scope if scope is not None and scope.task == _graph_task() else None


def _cause_of(scope: _Scope) -> Cause:
    file, line, entry = users_line()
    if scope.call is not None:
        return Cause(file, line, scope.call.function, *scope.call.explain(scope.path, scope.x), scope.path)
    func = _unplanned.get()
    if func is not None:
        return Cause(file, line, name_of(func), "", reduction(scope.path) or INSIDE, scope.path)
    function = "" if entry is None else entry.f_code.co_qualname.replace(".__init__", "")
    return Cause(file, line, function, "", ASKED, scope.path)


def reduction(path: Path) -> str | None:
    """What a path is for, if it reduces something that is pending."""
    if not path:
        return None
    ends = zip(path[0].source.layout.pending, path[-1].target.layout.pending, strict=True)
    reduced = [before for before, after in ends if before is not None and after is None]
    return f"pending {reduced[0].reduce_op} reduced" if reduced else None


# Nodes of the graph


def _mark(nodes: Sequence[Any], known: set[Any]) -> None:
    """Tell the nodes above `known` ones what they were made for."""
    waiting = [node for node in nodes if node is not None]
    why = cause()[0] if waiting else None
    while waiting and why is not None:
        node = waiting.pop()
        if node in known or node.__class__ is _Leaf or _KEY in node.metadata:
            continue
        node.metadata[_KEY] = why
        waiting += [following for following, _ in node.next_functions if following is not None]


def _nodes(tensors: Iterable[Tensor]) -> list[Any]:
    if not torch.is_grad_enabled():  # none are made; and a view that was written to would not say which one it has
        return []
    with _disabled():
        return [shard.grad_fn for x in tensors for shard in (x, *x.__dict__.get("_peers", ()))]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


# The user's line


def users_line() -> tuple[str, int, FrameType | None]:
    """The innermost line that is neither ours nor torch's: file and number; and our frame that is nearest to it."""
    entry, frame = None, sys._getframe(1)
    while frame is not None and is_ours(module := frame.f_globals.get("__name__", "")):
        entry = frame if module.startswith("shardwise") else entry
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "", 0, None
    return frame.f_code.co_filename, frame.f_lineno, entry


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("shardwise", "torch")


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """A torch function as users write it: `F.linear`, `Tensor.add`, `torch.cat`.

    >>> name_of(torch.nn.functional.linear), name_of(torch.Tensor.add), name_of(torch.cat)
    ('F.linear', 'Tensor.add', 'torch.cat')
    """
    name = getattr(func, "__name__", str(func))
    known = torch.overrides.resolve_name(func) or (f"torch.{name}" if getattr(torch, name, None) is func else name)
    for prefix, short in (
        ("torch.nn.functional.", "F."),
        ("torch.Tensor.", "Tensor."),
        ("torch.functional.", "torch."),
    ):
        known = known.replace(prefix, short)
    return known.removesuffix(".__get__")
