"""The errors users meet. Each says what was asked, what is wrong with it, and what to do instead."""

from __future__ import annotations


class ShardwiseError(Exception):
    """The root of every error raised on purpose by this package."""


class PlacementError(ShardwiseError, ValueError):
    """A placement does not fit the tensor or the mesh it is meant for."""


class MeshError(ShardwiseError, ValueError):
    """A mesh, an axis name, or a pair of meshes does not fit."""


class PlanError(ShardwiseError, ValueError, NotImplementedError):
    """A plan, or a style of it, does not fit the module it is meant for."""


class ShardShapeError(ShardwiseError, ValueError, RuntimeError):
    """A shard has a shape that its layout does not allow, or a gradient one that its tensor does not."""


class IndexRangeError(ShardwiseError, IndexError, RuntimeError):
    """An index is out of bounds. Torch raises one or the other of these, by the function."""


class ReplicaError(ShardwiseError, ValueError):
    """Ranks disagree about a value they all must hold alike."""


class MixedTensorError(ShardwiseError, RuntimeError):
    """A plain tensor meets DTensors in one call and its layout is unknown."""


class ShardMemoryError(ShardwiseError, RuntimeError, BufferError):
    """The memory of one rank's shard would be taken for the whole tensor's."""


class InPlaceError(ShardwiseError, RuntimeError):
    """An in-place operation would need a layout its target does not have."""


class StrideError(ShardwiseError, RuntimeError):
    """A call depends on strides that a sharded tensor does not have."""


class HookError(ShardwiseError, RuntimeError):
    """A gradient hook would see only a part of its gradient, or one rank's shard of it."""


class TransformError(ShardwiseError, NotImplementedError):
    """A transform of functions would see one rank's shard instead of the tensor."""


class UnreducedGradientError(ShardwiseError, RuntimeError):
    """An optimizer is about to step while the reduction of gradients is deferred."""


class NoDataError(ShardwiseError, NotImplementedError):
    """A call needs the data of tensors that have none, on the meta device."""


class StrictModeError(ShardwiseError, RuntimeError):
    """Strict mode: a call would have to gather the shards it is given, or to move what it may not."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint does not fit what it is saved from or loaded into, or some rank could not save or load its part."""


class CheckpointFileError(OSError, CheckpointError):
    """A file of a checkpoint cannot be opened, read or written. `errno` says why, as of any OSError."""


class DamagedFileError(CheckpointError, ValueError):
    """A file is not what its format, its header or its checksums say. `path`, `key` and `offset` (in bytes, from the
    beginning of the file) say where, as far as that is known."""

    def __init__(self, what: str, path: object = None, *, key: str | None = None, offset: int | None = None) -> None:
        place = "" if path is None else f"{path}"
        place += "" if offset is None else f", at byte {offset}"
        place += "" if key is None else f", key {key!r}"
        super().__init__(f"{place}: {what}" if place else what)
        self.path, self.key, self.offset = path, key, offset


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or not all of it could be restored."""


class KernelWarning(UserWarning):
    """A kernel for a device is missing; what it does is done in more steps."""


class FallbackWarning(UserWarning):
    """A call cannot run on the shards it is given; they were gathered and it ran replicated."""


class CaptureError(ShardwiseError):
    """A program cannot be captured as it is."""


class SavedProgramError(ShardwiseError, ValueError):
    """A program cannot be saved; or what was saved is damaged, or does not fit what it is to be run on."""


class CaptureWarning(UserWarning):
    """A function that was to be captured runs as it is."""
