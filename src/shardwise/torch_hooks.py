"""Every hook into torch, with its reason. `import shardwise` installs none of them: the first mesh does.

A hook is a public extension point, or stands where C++ would silently take a DTensor's shard for the whole and nothing
else asks, or where Python asks by torch's own class. None is on the way of an op of a plain tensor. What is not caught
so is listed in README's Limits. Those in modules that are not imported yet wait for that in `sys.meta_path`.

At import shardwise registers nothing with torch but names of its own: the ops `shardwise::…`, which exist for traces on
meta tensors, and the functions that rebuild a DTensor, for `torch.load(weights_only=True)` in programs that load before
they make a mesh. The first mesh registers DTensor among the types of which torch gives lists to one call, as torch's
own DTensor is: in clipping, and where an optimizer is told nothing else.
Only `destroy_process_group` is replaced elsewhere (`comm.process_group`): from the first collective, or save, that is
left under way it waits for those that are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import util
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.distributed
from torch._functorch import eager_transforms, vmap
from torch.autograd import function, graph
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import optimizer
from torch.utils import _foreach_utils, checkpoint

from shardwise.dispatch.interop.autograd_function import apply, keeping_shards, listening_to_shards
from shardwise.dispatch.interop.mixing import refusing_collectives, refusing_parameters
from shardwise.dispatch.interop.state_dicts import knowing_dtensors, staging_shards
from shardwise.dispatch.interop.transforms import refusing
from shardwise.layout.mesh import before_first
from shardwise.parallel.loaded_state import take_any_state_of
from shardwise.parallel.optimizers import step_on_shards
from shardwise.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Replaced:
    """An attribute of torch's, and what takes its place, made from what was there."""

    home: Any
    name: str
    make: Callable[[Any], Any]
    why: str

    def install(self) -> None:
        if hasattr(self.home, self.name):  # else this version of torch, or this build, has no such thing
            setattr(self.home, self.name, self.make(getattr(self.home, self.name)))


@dataclass(frozen=True, slots=True)
class ReplacedLater:
    """The same in a module that few programs import, and that takes its time: when it is imported, if it ever is.
    `within` names the class, if it is one's."""

    module: str
    name: str
    make: Callable[[Any], Any]
    why: str
    within: str | None = None

    def install(self) -> None:
        if self.module in sys.modules:
            self._install_in(sys.modules[self.module])
        else:
            sys.meta_path.insert(0, _Arrival(self.module, self._install_in))

    def _install_in(self, module: ModuleType) -> None:
        home = module if self.within is None else getattr(module, self.within)
        Replaced(home, self.name, self.make, self.why).install()


class _Arrival(MetaPathFinder):
    """Waits for the import of one module, which others find and load."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


@dataclass(frozen=True, slots=True)
class Registered:
    """A hook for which torch has a function."""

    register: Callable[[Any], Any]
    hook: Callable[..., Any]
    why: str

    def install(self) -> None:
        self.register(self.hook)


HOOKS: tuple[Replaced | ReplacedLater | Registered, ...] = (
    Registered(
        optimizer.register_optimizer_step_pre_hook,
        step_on_shards,
        "element-wise optimizers step on the shards themselves, matrices by their owners, and loaded state is laid out "
        "as the parameters; gradients kept by no_sync are not forgotten",
    ),
    Registered(
        register_module_parameter_registration_hook,
        take_any_state_of,
        "load_state_dict copies plain tensors into parameters, and nothing else tells a module to keep its rank's part",
    ),
    Replaced(
        function._SingleLevelFunction,
        "apply",
        lambda original: classmethod(apply),
        "Function.apply asks nobody, and backward would see shards. What it calls in turn is replaced, so that "
        "`f = MyFunction.apply`, taken before the first mesh, is caught as well",
    ),
    Replaced(
        graph.saved_tensors_hooks,
        "__init__",
        listening_to_shards,
        "who packs saved tensors would be given DTensors with the shape of the whole and the data of a shard",
    ),
    Replaced(
        checkpoint,
        "_CheckpointFrame",
        keeping_shards,
        "a checkpoint keeps its arguments as autograd keeps tensors, which would lose their layouts",
    ),
    Replaced(
        eager_transforms,
        "_wrap_tensor_for_grad",
        refusing("grad"),
        "torch.func.grad, vjp, jacrev wrap tensors in C++, and would differentiate the shard",
    ),
    Replaced(vmap, "_add_batch_dim", refusing("vmap"), "torch.vmap wraps tensors in C++, and would batch the shard"),
    Replaced(
        distributed_c10d,
        "_ensure_all_tensors_same_dtype",
        refusing_collectives,
        "torch.distributed's functions ask their first tensor, and would send or write to shards among the others",
    ),
    Replaced(
        torch.distributed,
        "_verify_params_across_processes",
        refusing_collectives,
        "DistributedDataParallel begins with it, and would add up shards of different parts of a gradient",
    ),
    ReplacedLater(
        "torch.distributed._state_dict_utils",
        "_iterate_state_dict",
        knowing_dtensors,
        "torch.distributed.checkpoint takes DTensors for plain tensors where it gathers state dicts, and keeps shards",
    ),
    ReplacedLater(
        "torch.distributed.checkpoint._state_dict_stager",
        "_offload_tensor",
        staging_shards,
        "it copies what is saved in the background by its memory, which would be a shard's",
        within="StateDictStager",
    ),
    ReplacedLater(
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        "_verify_managed_param",
        refusing_parameters,
        "torch's fully_shard would cut a shard for the whole, or the whole once more, and train wrong values",
    ),
)


def install() -> None:
    for hook in HOOKS:
        hook.install()
    _foreach_utils._foreach_supported_types.append(DTensor)


before_first.append(install)
