"""Fourier transforms."""

import pytest
import torch
from sweep import mesh_of, normal, place, sweep
from torch import Tensor, fft
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def parts(z: Tensor) -> list[Tensor]:
    """A complex result as two that have real gradients."""
    return [z.abs(), (z * (1 - 2j)).abs()]


REAL = {
    "fft": lambda a: parts(fft.fft(a)),
    "ifft": lambda a: parts(fft.ifft(a, dim=0, norm="ortho")),
    "fft2": lambda a: parts(fft.fft2(a, norm="forward")),
    "fftn": lambda a: parts(fft.fftn(a, dim=(0, 2))),
    "rfft": lambda a: parts(fft.rfft(a)),
    "rfft2": lambda a: parts(fft.rfft2(a)),
    "ihfft": lambda a: parts(fft.ihfft(a, dim=1)),
    "round trip": lambda a: fft.irfft(fft.rfft(a, dim=1), n=a.shape[1], dim=1),
    "irfft": lambda a: fft.irfft(fft.fft(a, dim=0), dim=1),
    "irfftn": lambda a: fft.irfftn(fft.fft(a), dim=(0, 1)),
    "hfft": lambda a: fft.hfft(fft.fft(a), n=7),
    "fftn of all": lambda a: parts(fft.fftn(a, norm="ortho")),
    "ifftn of all": lambda a: parts(fft.ifftn(a)),
    "rfftn of all": lambda a: parts(fft.rfftn(a, norm="forward")),
    "irfftn of all": lambda a: fft.irfftn(fft.fft(a, dim=0), s=(3, 5, 7), norm="forward"),
    "hfftn of all": lambda a: fft.hfftn(fft.fft(a, dim=0), norm="ortho"),
    "fftshift": lambda a: fft.fftshift(a, dim=1),
    "ifftshift": lambda a: fft.ifftshift(a),
}


@pytest.mark.parametrize("op", REAL.values(), ids=REAL)
def test_transform(op):
    sweep(op, normal(3, 5, 4))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_other_lengths():
    """Cutting and padding come first."""
    sweep(lambda a: parts(fft.fft(a, n=3)), normal(3, 5))
    sweep(lambda a: parts(fft.rfft(a, n=8)), normal(3, 5))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("where", [R, S(0), S(1), P()], ids=str)
def test_complex_input(where):
    z = torch.complex(normal(5, 4), normal(4, 5).T)
    for op in (fft.fft, fft.ifft2, fft.irfft, lambda a: fft.hfft(a, dim=0), lambda a: fft.fftn(a, dim=())):
        torch.testing.assert_close(op(place(z, where, mesh=(4,))).full_tensor(), op(z))


STAYS = {
    "fft": (fft.fft, S(0), S(0)),
    "rfft": (fft.rfft, S(1), S(1)),
    "fft2": (fft.fft2, S(0), S(0)),
    "pending": (fft.fft, P(), P()),
    "pending average": (fft.rfft, P("avg"), P("avg")),
}


@pytest.mark.parametrize(("op", "where", "out"), STAYS.values(), ids=STAYS)
def test_nothing_moves(op, where, out):
    x = place(normal(6, 4, 8), where)
    with CommDebugMode() as comm:
        result = op(x)
    assert result.placements == (out,) and not comm.get_comm_counts()
    torch.testing.assert_close(result.full_tensor(), op(normal(6, 4, 8)))


SEVERAL_DIMS = {
    "fft2": (fft.fft2, False),
    "ifftn": (fft.ifftn, True),
    "rfft2": (fft.rfft2, False),
    "irfft2": (fft.irfft2, True),
    "hfft2": (fft.hfft2, True),
    "ihfft2": (fft.ihfft2, False),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("op", "of_complex"), SEVERAL_DIMS.values(), ids=SEVERAL_DIMS)
def test_a_sharded_dim_is_gathered_for_its_own_transform(op, of_complex, dim):
    """With a warning; who wants to hold no more than a share transforms the dims one by one."""
    x = normal(256, 256)
    x = torch.complex(x, x.T) if of_complex else x
    d, plain = place(x, S(dim), mesh=(4,)).requires_grad_(), x.clone().requires_grad_()
    with CommDebugMode() as comm:
        result = op(d)
        result.abs().square().mean().backward()
    assert comm.get_comm_counts() == {"all_gather": 1}
    expected = op(plain)
    expected.abs().square().mean().backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)


def test_dims_one_after_the_other_on_shards():
    """What `redistribute` says between transforms is all that moves."""
    x = normal(16, 12, 8)
    d = place(x, S(0), mesh=(4,))
    with CommDebugMode() as comm, sw.strict():
        result = fft.fft(fft.fft2(d).redistribute(placements=[S(1)]), dim=0)
    assert comm.get_comm_counts() == {"all_to_all": 1} and result.placements == (S(1),)
    torch.testing.assert_close(result.full_tensor(), fft.fftn(x))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_dims_on_two_axes():
    x = normal(64, 48, 40)
    for where in ([S(0), S(1)], [S(1), S(0)], [S(0), S(0)], [S(2), S(0)]):
        torch.testing.assert_close(fft.fftn(place(x, *where, mesh=(2, 2))).full_tensor(), fft.fftn(x))


def test_whole_dims_are_transformed_at_once():
    """Where nothing moves, the function itself runs on the shards: torch's libraries know transforms of many dims."""
    x = place(normal(4, 6, 8), S(0))
    fft.fftn(x, dim=(1, 2))  # planned
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._fft_c2c.default:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        fft.fftn(x, dim=(1, 2))
    assert seen == [[1, 2]] * 2  # by two ranks


@pytest.mark.parametrize("shape", [(3, 9), (9,)], ids=str)
def test_short_time_transforms(shape):
    def stft(a: Tensor, window: Tensor) -> list[Tensor]:
        return parts(a.stft(4, hop_length=2, window=window, return_complex=True))

    def there_and_back(a: Tensor, window: Tensor) -> Tensor:
        spectrum = torch.stft(a, 4, 1, window=window, return_complex=True)
        return torch.istft(spectrum * 2, 4, 1, window=window, length=7)

    window = torch.hann_window(4, dtype=torch.float64) + 0.1
    for op in (stft, there_and_back):
        sweep(op, normal(*shape), window)


def test_short_time_transforms_stay_where_they_are():
    x, window = place(normal(4, 16), S(0)), place(torch.ones(4, dtype=torch.float64), R)
    with sw.strict(), CommDebugMode() as comm:
        spectrum = torch.stft(x, 4, window=window, return_complex=True)
        back = torch.istft(spectrum, 4, window=window)
    assert spectrum.placements == back.placements == (S(0),) and not comm.get_comm_counts()
    torch.testing.assert_close(back.full_tensor(), normal(4, 16))


def test_a_window_with_gaps_is_refused():
    window = torch.zeros(4, dtype=torch.float64)
    spectrum = torch.stft(normal(2, 16), 4, window=window + 1, return_complex=True)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        torch.istft(spectrum, 4, window=window)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        torch.istft(place(spectrum, S(0), mesh=(4,)), 4, window=sw.distribute_tensor(window, mesh_of((4,))))


@pytest.mark.parametrize("make", [torch.hann_window, torch.hamming_window, torch.bartlett_window, torch.kaiser_window])
def test_windows(make):
    """A window is a plain tensor, the same on every rank."""
    x = place(normal(5, 6), S(1))
    window = sw.distribute_tensor(make(6, dtype=torch.float64), x.device_mesh)
    torch.testing.assert_close((x * window).full_tensor(), normal(5, 6) * make(6, dtype=torch.float64))
