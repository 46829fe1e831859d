"""No shard passes for the whole: whatever hands out memory is right for the whole tensor, or refused in words."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.errors import ShardMemoryError

MESH = sw.simulate((2,), ("tp",))
WHOLE = torch.arange(8.0).view(4, 2)
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]
anyhow = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def place(placement: sw.Placement, plain: Tensor = WHOLE) -> DTensor:
    return sw.distribute_tensor(plain, MESH, [placement])


def deprecated(access: Callable[[DTensor], Any]) -> Callable[[DTensor], Any]:
    def quietly(d: DTensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return access(d)

    return quietly


REFUSED: dict[str, Callable[[DTensor], Any]] = {
    "data_ptr": lambda d: d.data_ptr(),
    "data_ptr of the class": lambda d: Tensor.data_ptr(d),
    "untyped_storage": lambda d: d.untyped_storage(),
    "storage": deprecated(lambda d: d.storage()),
    "_typed_storage": lambda d: d._typed_storage(),
    "storage_offset": lambda d: d.storage_offset(),
    "dlpack": lambda d: torch.from_dlpack(d),
    "dlpack without a copy": lambda d: torch.from_dlpack(d, copy=False),
    "numpy's dlpack": lambda d: numpy.from_dlpack(d),
    "numpy without a copy": lambda d: numpy.array(d, copy=False),
    "pickled as a plain tensor": lambda d: d._reduce_ex_internal(2),
    "sent as a plain tensor": lambda d: torch.multiprocessing.reductions.reduce_tensor(d),
    "its storage in another": lambda d: torch.empty(0).set_(d.untyped_storage()),
}
if hasattr(Tensor, "const_data_ptr"):  # since torch 2.13
    REFUSED["const_data_ptr"] = lambda d: d.const_data_ptr()


@anyhow
@pytest.mark.parametrize("access", REFUSED.values(), ids=REFUSED)
def test_addresses_are_not_given(access: Callable, placement: sw.Placement) -> None:
    d = place(placement)
    with pytest.raises(ShardMemoryError, match=r"would give the memory .* x\.full_tensor\(\).* or of x\.to_local\(\)"):
        access(d)
    assert torch.equal(d.full_tensor(), WHOLE)


def test_the_words_of_a_refusal() -> None:
    with pytest.raises(ShardMemoryError) as error:
        place(Shard(0)).untyped_storage()
    assert str(error.value) == (
        "untyped_storage(f32[4,2] S(0)@tp) would give the memory of this rank's shard for the whole tensor's; take it "
        "of x.full_tensor(), on all ranks together, or of x.to_local() where the shard is what you mean. Files of a "
        "sharded model are written and read by shardwise.checkpoint: save, load, save_pretrained"
    )
    assert isinstance(error.value, BufferError)  # what exporters of memory are to raise


@anyhow
def test_what_is_to_be_called_instead(placement: sw.Placement) -> None:
    d = place(placement)
    assert d.full_tensor().untyped_storage().nbytes() == WHOLE.nbytes
    assert len(set(d.to_local().data_ptr().values)) == 2


@anyhow
def test_safetensors_refuses_shards_and_takes_the_whole(placement: sw.Placement, tmp_path: Path) -> None:
    state, path = {"w": place(placement), "b": place(Replicate(), torch.ones(3))}, tmp_path / "model.safetensors"
    with pytest.raises(ShardMemoryError, match=r"x\.full_tensor\(\), on all ranks together"):
        safetensors.torch.save_file(state, path)
    assert not path.exists()
    with pytest.raises(ShardMemoryError):
        safetensors.torch.save(state)
    safetensors.torch.save_file({name: d.full_tensor() for name, d in state.items()}, path)
    assert torch.equal(safetensors.torch.load_file(path)["w"], WHOLE)


# numpy


@anyhow
@pytest.mark.parametrize("access", [lambda d: d.numpy(), numpy.asarray, lambda d: d.numpy(force=True)])
def test_arrays_are_whole_and_read_only(access: Callable, placement: sw.Placement) -> None:
    d = place(placement)
    array = access(d)
    assert numpy.array_equal(array, WHOLE.numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 9.0
    assert torch.equal(d.full_tensor(), WHOLE)


@anyhow
def test_arrays_that_are_copies_can_be_written_to(placement: sw.Placement) -> None:
    d = place(placement)
    for array in (numpy.array(d), numpy.array(d, dtype=numpy.float64), numpy.asarray(d, copy=True)):
        array += 1
        assert numpy.array_equal(array, WHOLE.numpy() + 1)
    assert numpy.asarray(d, dtype=numpy.int64).tolist() == WHOLE.tolist()
    assert torch.equal(d.full_tensor(), WHOLE)


def test_arrays_of_what_requires_a_gradient() -> None:
    d = place(Shard(0)).requires_grad_()
    for access in (lambda: d.numpy(), lambda: numpy.asarray(d)):
        with pytest.raises(RuntimeError, match="requires grad"):
            access()
    assert d.numpy(force=True).tolist() == WHOLE.tolist()


# dlpack


@anyhow
def test_a_copy_that_is_asked_for_is_whole(placement: sw.Placement) -> None:
    d = place(placement)
    for made in (torch.from_dlpack(d, copy=True), torch.as_tensor(numpy.from_dlpack(d, copy=True))):
        assert torch.equal(made.add_(1), WHOLE + 1)
    assert torch.equal(d.full_tensor(), WHOLE)
    assert d.__dlpack_device__() == WHOLE.__dlpack_device__()


def test_what_dlpack_does_in_c_is_withheld() -> None:
    d = place(Shard(0))
    assert not hasattr(d, "__dlpack_c_exchange_api__") and not hasattr(DTensor, "__dlpack_c_exchange_api__")
    assert not hasattr(d, "__cuda_array_interface__") and not hasattr(d, "__array_interface__")
    for view in (memoryview, numpy.frombuffer):
        with pytest.raises(TypeError, match="bytes-like"):
            view(d)


# Every attribute of a tensor

OF_THE_OBJECT = {
    *("__class__", "__dict__", "__dir__", "__doc__", "__module__", "__annotations__", "__hash__", "__getstate__"),
    *("__repr__", "__str__"),  # say whose shard they show: tests/unit/test_repr.py
    *("_cdata", "_base", "_is_view", "_use_count"),  # how C++ holds it
    *("new", "new_empty", "backward"),  # memory that is not written to; a bound function
}
HANDS_OUT = {
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_offset"),
    *("__dlpack__", "__dlpack_c_exchange_api__", "set_"),
}


def flat(value: Any) -> Any:
    """A result in terms of plain values."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    if isinstance(value, Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, (list, tuple, types.GeneratorType)) or hasattr(value, "__next__"):
        return [flat(item) for item in value]
    return value


def asked(x: Any, name: str) -> Any:
    """What an attribute or a method without arguments answers; None if it does not."""
    torch.manual_seed(0)
    try:
        found = getattr(x, name)
        found = flat(found() if callable(found) else found)
    except Exception:
        return None
    return None if found is NotImplemented else (found,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
def test_every_attribute_and_every_method_without_arguments(placement: sw.Placement) -> None:
    """They answer for the whole; those that do not answer are known."""
    names = {*dir(Tensor), *dir(torch._C.TensorBase)} - OF_THE_OBJECT
    mine = {name: asked(place(placement, WHOLE.clone()), name) for name in names}
    theirs = {name: asked(WHOLE.clone(), name) for name in names}
    assert {name: x for name, x in mine.items() if x is not None and repr(x) != repr(theirs[name])} == {}
    silent = {name for name in names if mine[name] is None and theirs[name] is not None}
    assert silent == names & HANDS_OUT


FACTS = (
    *("nbytes", "itemsize", "grad_dtype", "volatile", "dtype", "device", "layout", "is_leaf", "requires_grad"),
    *("dim_order", "sparse_dim", "dense_dim", "is_distributed", "_is_zerotensor", "stride", "storage_type", "numel"),
)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:volatile was removed")
@pytest.mark.parametrize("name", [name for name in FACTS if hasattr(Tensor, name)])
@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
def test_facts_are_known_without_asking_other_ranks(name: str, placement: sw.Placement) -> None:
    """One rank alone may ask (to log them, say)."""
    d, plain = place(placement).requires_grad_(), WHOLE.clone().requires_grad_()
    with CommDebugMode() as comm:
        assert asked(d, name) == asked(plain, name) is not None
    assert comm.get_comm_counts() == {}


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no dtypes of gradients")
def test_the_dtype_of_gradients_is_every_shards() -> None:
    d = place(Shard(0)).requires_grad_()
    d.grad_dtype = torch.float64
    assert d.grad_dtype == torch.float64 and all(peer.grad_dtype == torch.float64 for peer in d._peers)
    d.sum().backward()
    assert d.grad.dtype == torch.float64


# What torch itself does with memory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(place(Shard(0)))
        self.second = self.first
        self.register_buffer("buffer", place(Replicate()))


def test_what_torch_does_with_memory_goes_on() -> None:
    net = Net()
    assert all(x.is_shared() for x in net.share_memory().state_dict().values())
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), saved(net)):
        assert made.first is made.second and made.first is not net.first
        assert torch.equal(made.first.detach().full_tensor(), WHOLE) and made.first.placements == (Shard(0),)
    loaded = saved(net.state_dict())
    assert torch.equal(loaded["first"].full_tensor(), WHOLE)
    flat = torch._utils._flatten_dense_tensors([net.first.detach(), net.buffer])
    assert torch.equal(flat.full_tensor(), torch.cat([WHOLE.view(-1), WHOLE.view(-1)]))
    net.to(torch.float64)
    assert net.first is net.second and net.first.dtype == torch.float64


def saved(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_another_process_gets_the_shards_and_the_layout() -> None:
    sent = multiprocessing.reduction.ForkingPickler.dumps(place(Shard(0)))
    assert torch.equal(pickle.loads(sent).full_tensor(), WHOLE)


def test_recurrent_weights_are_not_rearranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch compares where the weights of a layer lie before it moves them together."""
    layer = sw.distribute_module(nn.LSTM(2, 3), MESH)
    moved: list[Any] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *args: moved.append(args))
    layer.flatten_parameters()
    assert moved == []


def test_mutation_of_saved_tensors() -> None:
    """torch's context looks at addresses, of shards."""
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = place(Shard(0)).requires_grad_()
        y = x.clone()
        z = y.square().sum()
        y.mul_(2)
        z.backward()
    assert torch.equal(x.grad.full_tensor(), 2 * WHOLE)


@anyhow
def test_functions_of_elements_are_refused(placement: sw.Placement) -> None:
    d, before = place(placement), WHOLE.clone()
    for call in (
        lambda: d.apply_(abs),
        lambda: d.map_(d, max),
        lambda: d.map2_(d, d, max),
        lambda: before.map_(d, max),
        lambda: d.is_set_to(d),
    ):
        with pytest.raises(ShardMemoryError, match=r"x\.to_local\(\) where the shard is what you mean"):
            call()
    assert torch.equal(d.full_tensor(), WHOLE) and torch.equal(before, WHOLE)
