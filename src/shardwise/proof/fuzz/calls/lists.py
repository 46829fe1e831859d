"""Calls on lists of tensors, and complex numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.proof.fuzz.draw import Draw, Refused, Var
from shardwise.proof.fuzz.program import Line

NEW = """
torch._foreach_add({l}, {c}) | torch._foreach_mul({l}, {c}) | torch._foreach_norm({l}) | torch._foreach_mul({l}, {l})
torch._foreach_tanh({l}) | torch._foreach_neg({l}) | torch._foreach_norm({l}, 1) | torch._foreach_sub({l}, {l})
torch._foreach_addcmul({l}, {l}, {l}, {c}) | torch._foreach_lerp({l}, {l}, {c}) | torch._foreach_div({l}, {c})
"""
WRITTEN = """
torch._foreach_mul_({l}, {c}) | torch._foreach_add_({l}, {c}) | torch._foreach_add_({l}, {l}, alpha={c})
torch._foreach_tanh_({l}) | torch._foreach_zero_({l}) | torch._foreach_neg_({l}) | torch._foreach_mul_({l}, {l})
"""
OF_COMPLEX = """
torch.view_as_real({z}) | {z}.real | {z}.imag | {z}.abs() | {z} * {z}.conj() | {z} * (1 - 2j) | {z}.conj()
{z}.sum() | {z}.angle() | torch.view_as_real({z}.conj().resolve_conj()) | {z} @ {z}.mH | {z} * {z}
"""


def _list(d: Draw, *, repeats: bool = True, written: bool = False) -> str:
    """A list of tensors, in which one may stand twice."""
    draw = d.target if written else d.tensor
    found = [draw(0, 1, 2, 3) for _ in range(d.chance.randint(1, 3))]
    names = list(map(str, found)) if repeats else list(dict.fromkeys(map(str, found)))
    return f"[{', '.join(names)}]"


def foreach(d: Draw) -> str:
    return d.way(NEW).format(l=_list(d), c=d.number())


def foreach_written(d: Draw) -> Line:
    names = _list(d, written=True)
    text = d.way(WRITTEN).format(l=names, c=d.number())
    recorded = not d.likely(0.5)
    written = eval(names, d.run.names)
    if recorded and _share_memory(written) and ("tanh_" in text or any(x._is_view() for x in written)):
        raise Refused("torch saves what is there after the last write, and its histories of views and bases differ")
    return Line(text if recorded else f"with torch.no_grad(): {text}")


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    return len({x.untyped_storage().data_ptr() for x in tensors}) < len(tensors)


def clip(d: Draw) -> str:
    return f"torch.nn.utils.get_total_norm({_list(d, repeats=False)})"


def complex_of(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    pair = d.fit((*x.shape, 2), x.dtype)
    way = d.way("torch.complex({x}, {x}) | torch.complex({x}, -{x} * 2) | torch.view_as_complex({p})")
    return way.format(x=x, p=pair)


def of_complex(d: Draw) -> str:
    z = _complex(d)
    return d.way(OF_COMPLEX).format(z=z)


def complex_written(d: Draw) -> Line:
    z = _complex(d)
    text = d.way("torch.view_as_real({z}).mul_(3) | {z}.mul_(0.5j) | {z}.real.add_(1) | {z}.imag.zero_()").format(z=z)
    return d.maybe_unrecorded(text)


def _complex(d: Draw) -> Var:
    return d.some(lambda x: x.dtype.is_complex) or d.leaf(d.shape(d.pick(1, 2)), torch.complex128)


def fourier(d: Draw) -> str:
    x = d.tensor(1, 2)
    return d.way("torch.fft.fft({x}, dim={d}) | torch.fft.rfft({x}, dim={d}).abs()").format(x=x, d=d.dim(x))


FOREACH = (foreach, foreach, foreach_written, clip)
COMPLEX = (complex_of, complex_of, of_complex, of_complex, of_complex, complex_written, fourier)
