"""What plain programs do with `torch.FloatTensor` and its kin. Nothing here imports shardwise: run as a script it says
what torch alone answers, as JSON."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import json
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

ALL = sorted(torch._tensor_classes, key=lambda cls: (cls.__module__, cls.__name__))
STORED = [cls for cls in ALL if cls.__module__ == "torch"]
ONES = torch.ones(2, 3)


class Own(Tensor):
    """A subclass as others write them."""

    @staticmethod
    def __new__(cls, data: Any) -> Any:
        return super().__new__(cls, data)


def scripted(x: torch.LongTensor, y: torch.FloatTensor) -> torch.FloatTensor:
    return x.sum() + y


def constructs(x: Tensor) -> Tensor:
    return x + torch.LongTensor([1, 2]) + torch.FloatTensor(2).zero_()


def subclasses(x: Tensor) -> Tensor:
    return Own(x * 2) + (x * 3).as_subclass(Own) + Tensor._make_subclass(Own, x * 4)


def each(ask: Callable[[Any], Any]) -> list[Any]:
    return [outcome(functools.partial(ask, cls)) for cls in ALL]


def outcome(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def as_default(kind: Any) -> list[Any]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_tensor_type(kind)
        return [torch.get_default_dtype(), torch.ones(1).type(), torch.Tensor([1]).type()]
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)  # the device, too
        torch.set_default_dtype(before)


def loaded(data: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(data, file, **how)
    file.seek(0)
    return torch.load(file, weights_only=False)


def compiled(function: Callable[[Tensor], Tensor]) -> list[Any]:
    """The graph of a function, which is one, and what it gives."""
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.print_readable(False))
        return graph.forward

    torch._dynamo.reset()
    made = torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2))
    return [graphs[0].partition("\n")[2], type(made).__name__, made.tolist()]


ASKED: dict[str, Callable[[], Any]] = {
    # making tensors
    "sizes": lambda: each(lambda cls: cls(2, 3).shape),
    "a size": lambda: each(lambda cls: cls(torch.Size([2, 3])).shape),
    "nothing": lambda: each(lambda cls: cls().shape),
    "numbers": lambda: each(lambda cls: cls([[1, 0], [1, 1]])),
    "a tuple": lambda: each(lambda cls: cls((1, 0))),
    "an array": lambda: each(lambda cls: cls(numpy.ones(2))),
    "a tensor": lambda: each(lambda cls: cls(ONES)),
    "a tensor by name": lambda: torch.FloatTensor(other=ONES),
    "shared": lambda: torch.FloatTensor(ONES).data_ptr() == ONES.data_ptr(),
    "a storage": lambda: torch.FloatTensor(ONES.storage()),
    "an untyped storage": lambda: torch.FloatTensor(ONES.untyped_storage()),
    "a range": lambda: torch.LongTensor(range(3)),
    "a device": lambda: torch.FloatTensor([1.0], device="cpu"),
    "a wrong device": lambda: torch.FloatTensor([1.0], device="meta"),
    "an object": lambda: torch.FloatTensor(object()),
    "an unknown name": lambda: torch.FloatTensor(what=1),
    "numbers of tensors": lambda: torch.FloatTensor([ONES.sum(), 2]),
    "sparse": lambda: torch.sparse.FloatTensor(torch.tensor([[0, 1]]), torch.ones(2), torch.Size([2])).to_dense(),
    "subclass": lambda: [Own(ONES), ONES.as_subclass(Own), Tensor._make_subclass(Own, ONES, True)],
    "subclass of an instance": lambda: ONES._make_subclass(Own, ONES),
    # the classes
    "repr": lambda: each(repr),
    "names": lambda: each(lambda cls: (cls.__name__, cls.__qualname__, cls.__module__, torch.typename(cls))),
    "attributes": lambda: each(lambda cls: (cls.dtype, cls.layout, cls.is_cuda, cls.is_sparse, cls.is_xpu)),
    "doc": lambda: each(lambda cls: cls.__doc__),
    "dir": lambda: each(dir),
    "vars": lambda: each(lambda cls: sorted(vars(cls))),
    "mro": lambda: each(lambda cls: (cls.__mro__, cls.__bases__, cls.__basicsize__, type(cls))),
    "no such attribute": lambda: torch.FloatTensor.nothing,
    "immutable": lambda: each(lambda cls: setattr(cls, "extra", 1)),
    "immutable metaclass": lambda: setattr(type(torch.FloatTensor), "extra", 1),
    "subclassing": lambda: each(lambda cls: type("Sub", (cls,), {})),
    "kinds": lambda: each(lambda cls: (inspect.isclass(cls), callable(cls), isinstance(cls, type))),
    "same": lambda: each(lambda cls: [cls is other and hash(cls) == hash(other) for other in ALL if cls == other]),
    "members": lambda: [cls in torch._tensor_classes for cls in (torch.FloatTensor, torch.cuda.HalfTensor)],
    "found by name": lambda: each(lambda cls: getattr(eval(cls.__module__), cls.__name__) is cls),
    # what torch does with them
    "isinstance": lambda: each(lambda cls: [isinstance(x, cls) for x in (ONES, ONES.long(), ONES.to_sparse(), 1)]),
    "issubclass": lambda: each(lambda cls: [issubclass(Tensor, cls), issubclass(cls, Tensor), issubclass(cls, cls)]),
    "type": lambda: each(lambda cls: (ONES.type(cls).dtype, ONES.type(cls).layout)),
    "type by name": lambda: each(lambda cls: ONES.type(f"{cls.__module__}.{cls.__name__}").dtype),
    "type of": lambda: [ONES.type(), ONES.long().type(), ONES.to_sparse().type(), ONES.storage().type()],
    "default": lambda: each(as_default),
    "default by name": lambda: [outcome(lambda: as_default("torch.DoubleTensor")), outcome(lambda: as_default("x.Y"))],
    "pickle": lambda: each(lambda cls: (pickle.dumps(cls), pickle.loads(pickle.dumps(cls)) is cls)),
    "copy": lambda: each(lambda cls: (copy.deepcopy(cls) is cls, copy.copy(cls) is cls)),
    "checkpoint": lambda: [loaded({"kind": cls, "x": cls([1])})["kind"] is cls for cls in STORED],
    "old checkpoint": lambda: loaded([torch.FloatTensor, ONES], _use_new_zipfile_serialization=False),
    "weights only": lambda: torch._weights_only_unpickler._get_allowed_globals()["torch.FloatTensor"],
    "storages": lambda: [torch.FloatStorage, torch.FloatStorage([1.0]), torch.FloatStorage([1.0]).type()],
    "overrides": lambda: Tensor.as_subclass in torch.overrides.get_ignored_functions(),
    "annotations": lambda: each(lambda cls: torch.jit.annotations.try_ann_to_type(cls, None)),
    "script": lambda: str(torch.jit.script(scripted).graph),
    "scripted": lambda: torch.jit.script(scripted)(torch.ones(2, dtype=torch.int64), ONES),
    "scripted constructor": lambda: str(torch.jit.script(constructs))[:40],
    "fx": lambda: torch.fx.symbolic_trace(constructs)(torch.zeros(2)),
    "compiled": lambda: compiled(constructs),
    "compiled subclasses": lambda: compiled(subclasses),
}


def answers() -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # much of this is advised against
        return {name: re.sub("0x[0-9a-f]+", "0x", str(outcome(ask))) for name, ask in ASKED.items()}


if __name__ == "__main__":
    print(json.dumps(answers()))
