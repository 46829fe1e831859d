"""The loss of what a linear layer gives, whose logits exist only for a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm import Ranked, simulate
from shardwise.dispatch import implicit_replication
from shardwise.layout import Replicate
from shardwise.parallel.boundary import to_local
from shardwise.redistribute import own_node
from shardwise.rules.kit.treatments import treat
from shardwise.rules.losses.linear_cross_entropy import linear_cross_entropy as of_dtensors
from shardwise.rules.losses.linear_cross_entropy import with_logits
from shardwise.tensor import DTensor


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)`: `[..., d], [c, d], [...] -> []`, with logits
    that exist only for `chunk_size` rows at a time.

    Classes may be sharded, by the rows of `linear_weight`; rows of the input along other axes, or along the same
    (sequence parallelism: they are gathered, and their gradients reduce-scattered, chunk by chunk). Gradients of sums
    and means are computed beside the loss: nothing else takes more memory the more rows there are. The loss has the
    `dtype` that is asked for, else the input's; inside autocast, single precision. Targets that are probabilities, and
    gradients of gradients, need the logits as a whole. Other options are those of `parallel.cross_entropy`; plain
    tensors are taken as well.

    The layer's gradient is added up over the chunks in its own dtype. In half precision that rounds it once for each
    chunk; with `acc_dtype=torch.float32` it is as exact as that of one product, in three times the memory.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> hidden, head, target = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
    >>> x, w = sw.distribute_tensor(hidden, mesh), sw.distribute_tensor(head, mesh, [sw.Shard(0)])
    >>> loss = sw.parallel.linear_cross_entropy(x, w, sw.distribute_tensor(target, mesh), chunk_size=2)
    >>> torch.testing.assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(hidden @ head.T, target))
    """
    _check(input, linear_weight, target, linear_bias, z_loss, chunk_size)
    options: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "dtype": dtype}
    options |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    chunks: dict[str, Any] = {"chunk_size": chunk_size, "acc_dtype": acc_dtype}
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        with torch.autocast(device, enabled=False):
            narrow, of_loss = torch.get_autocast_dtype(device), dtype or torch.float32
            options |= {"linear_bias": _to(linear_bias, narrow), "weight": _to(weight, of_loss), "dtype": of_loss}
            return linear_cross_entropy(input.to(narrow), linear_weight.to(narrow), target, **chunks, **options)
    if target.is_floating_point():
        return with_logits(input, linear_weight, target, **options)
    given = (input, linear_weight, target, linear_bias, weight)
    function: Callable[..., Tensor] = of_dtensors if any(isinstance(x, DTensor) for x in given) else _of_plain_tensors
    return function(input, linear_weight, target, **chunks, **options)


def _check(
    x: Tensor, layer: Tensor, target: Tensor, bias: Tensor | None, z_loss: float, chunk_size: int | None
) -> None:
    name = "linear_cross_entropy"
    if layer.ndim != 2 or not x.ndim or x.shape[-1] != layer.shape[1]:
        raise ValueError(
            f"{name}: rows of linear_weight are as long as those of the input; they are {list(layer.shape)} and "
            f"{list(x.shape)}"
        )
    rows, probabilities = [*x.shape[:-1]], [*x.shape[:-1], layer.shape[0]]
    is_neither = target.dtype == torch.bool or target.is_complex()
    if is_neither or [*target.shape] != (probabilities if target.is_floating_point() else rows):
        raise ValueError(
            f"{name}: a target is integers {rows}, a class for each row of the input, or probabilities of all classes, "
            f"{probabilities}; this one is {str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        )
    if bias is not None and bias.shape != layer.shape[:1]:
        raise ValueError(
            f"{name}: linear_bias has a number for each of {layer.shape[0]} classes, not {list(bias.shape)}"
        )
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss is a factor of what is added to the loss, and is not negative; got {z_loss}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size is a number of rows, at least 1; got {chunk_size}")


def _to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _of_plain_tensors(*args: Any, **options: Any) -> Tensor:
    """By the same program, on a mesh of one rank; in the simulator, where each rank has its own, by what it stands
    for."""
    if any(isinstance(x, Ranked) for x in (*args, *options.values())):
        return with_logits(*args, **options)
    alone = simulate((1,), ("alone",), device=args[0].device.type)

    def shown(x: Any) -> Any:
        return DTensor.from_local(x, alone, [Replicate()]) if isinstance(x, Tensor) else x

    loss: Any = of_dtensors(*map(shown, args), **{name: shown(x) for name, x in options.items()})
    return _fresh(loss.full_tensor())


class LinearCrossEntropy(nn.Module):
    """A linear layer and the loss of its outputs, by `linear_cross_entropy`; `linear` is the layer.

    Its classes are sharded as those of any linear layer, by a plan: `{"linear": ColwiseParallel()}`. Plain inputs are
    then every rank's, and so is the loss.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> head = sw.parallel.LinearCrossEntropy(4, 10, label_smoothing=0.1)
    >>> _ = sw.parallel.parallelize_module(head, mesh, {"linear": sw.parallel.ColwiseParallel()})
    >>> head(torch.randn(6, 4), torch.arange(6)).shape
    torch.Size([])
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
        acc_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.z_loss, self.chunk_size, self.acc_dtype = z_loss, chunk_size, acc_dtype

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        options: dict[str, Any] = {"linear_bias": self.linear.bias, "weight": self.weight, "z_loss": self.z_loss}
        options |= {"reduction": self.reduction, "ignore_index": self.ignore_index}
        options |= {"label_smoothing": self.label_smoothing, "chunk_size": self.chunk_size}
        options["acc_dtype"] = self.acc_dtype
        given = (input, self.linear.weight, target)
        if isinstance(input, DTensor) or not isinstance(self.linear.weight, DTensor):
            return linear_cross_entropy(*given, **options)
        with implicit_replication():
            return whole_local(linear_cross_entropy(*given, **options), self)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"


def whole_local(loss: Any, module: nn.Module) -> Tensor:
    """A loss that every rank has, plain."""
    return _fresh(to_local(loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim), module))


def _fresh(loss: Tensor) -> Tensor:
    """A plain loss that is no view of a DTensor, since nobody has that: models add other losses to it in place."""
    return own_node(loss) if type(loss) is Tensor else loss


def _of_torch(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Torch's function of that name, where the classes are sharded. Where they are not, and with classes in several
    dims, the call is planned as any other. Its `options` say how torch goes about it on one device."""
    given = dict(zip(("input", "linear_weight", "target"), args, strict=False)) | kwargs
    options = given.pop("options", None)
    layer = given["linear_weight"]
    if not isinstance(layer, DTensor) or layer.ndim != 2 or not layer._layout.splits[0]:
        return NotImplemented
    if given.get("ignore_index") is None:
        given.pop("ignore_index", None)
    return linear_cross_entropy(**given, acc_dtype=getattr(options, "acc_dtype", None))


if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    treat(F.linear_cross_entropy, handler=_of_torch)
