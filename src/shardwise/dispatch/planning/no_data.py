"""Calls on tensors without data, as all are on a mesh that only records: what depends on data is refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.fallback import describe
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.errors import NoDataError
from shardwise.tensor import DTensor


def on_meta(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, DTensor) and x._layout.mesh.device_type == "meta" for x in flat_tensors((args, kwargs)))


class WithoutData:
    """A plan on the meta device. Where torch has no kernel for that, the reason is that there is no data to look at."""

    __slots__ = ("func", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func = plan, func

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        try:
            return self.plan(args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NoDataError) or not speaks_of_meta(error):
                raise
            raise needs_data(self.func, args, kwargs or {}) from error


def speaks_of_meta(error: Exception) -> bool:
    """Whether torch complains about a meta tensor: its words differ from op to op."""
    return re.search(r"(\b|_)meta\b", str(error), re.IGNORECASE) is not None


def needs_data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> NoDataError:
    name = getattr(func, "__name__", str(func))
    return NoDataError(
        f"{describe(name, args, kwargs)} depends on data, and these tensors have none: they are on the meta device. "
        f"Leave it out where collectives are counted, or run the program on shardwise.simulate"
    )
