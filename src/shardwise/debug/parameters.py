"""The modules that run while somebody looks: their parameters, and the layouts of these."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.tensor import DTensor


class ModuleParameters:
    """Collects the parameters of every module that runs, by the path of the module below the first one: `Net.up`."""

    def __init__(self) -> None:
        self.parameters: dict[str, dict[str, Tensor]] = {}
        self.placements: dict[str, tuple[Any, ...]] = {}
        self._known: WeakSet[nn.Module] = WeakSet()
        self._handle: Any = None

    def start(self) -> None:
        self.parameters.clear()
        self.placements.clear()
        self._known.clear()
        self._handle = register_module_forward_pre_hook(self._see)

    def stop(self) -> None:
        self._handle.remove()

    def _see(self, module: nn.Module, args: Any) -> None:
        """Of a module that none around it brought along: all modules below it."""
        if module in self._known:
            return
        for path, inner in module.named_modules(prefix=type(module).__name__):
            self._known.add(inner)
            for name, parameter in inner.named_parameters(recurse=False):
                self.parameters.setdefault(path, {})[name] = parameter.data
                if isinstance(parameter, DTensor):
                    self.placements[f"{path}.{name}"] = parameter.placements
