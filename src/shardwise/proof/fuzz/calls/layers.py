"""Layers: norms, convolutions, pooling, losses."""

from __future__ import annotations

import math

from shardwise.proof.fuzz.draw import Draw, Refused, Var, apart, off

NORMS = """
F.layer_norm({x}, {s}, {w}, {b}, eps=0.1) | F.layer_norm({x}, {s}, eps=0.1) | F.layer_norm({x}, {s}, {w})
F.rms_norm({x}, {s}, {w}, eps=0.1) | F.rms_norm({x}, {s}, eps=0.1)
"""
BATCH_NORMS = """
F.batch_norm({x}, None, None, {w}, {b}, training=True, eps=0.1)
F.batch_norm({x}, {m}, {v} ** 2 + 1, {w}, {b}, eps=0.1) | F.instance_norm({x}, eps=0.1)
"""
VARIANCE = 1e-3
"""Below it rounding grows where numbers are divided by their deviation."""

LOSSES = """
F.mse_loss({x}, {y}, reduction='{h}') | F.l1_loss({x}, {y}, reduction='{h}') | F.huber_loss({x}, {y})
F.smooth_l1_loss({x}, {y}, reduction='{h}') | F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())
F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), reduction='sum') | F.soft_margin_loss({x}, {y}.sign())
"""
ENTROPIES = """
F.cross_entropy({x}, {t}{o}) | F.cross_entropy({x}, {t}{o}) | F.nll_loss({x}.log_softmax(1), {t})
F.cross_entropy({x}, {t}, {w} ** 2) | F.cross_entropy({x}, {x}.softmax(1))
"""


def normalised(d: Draw) -> str:
    x = d.tensor(2, 3)
    shape = x.shape[-d.pick(1, 1, 2) :]
    weight, bias = d.fit(shape, x.dtype), d.fit(shape, x.dtype)
    text = d.way(NORMS).format(x=x, s=shape, w=weight, b=bias)
    rows = x.value.detach().flatten(-len(shape))
    if "eps" not in text and (rows.var(-1, correction=0) < VARIANCE).any():
        raise Refused("one number, or the same ones: torch divides what is rounding by the root of eps")
    return text


def group_norm(d: Draw) -> str:
    x = d.tensor(2, 3, 4)
    channels = x.shape[1]
    groups = d.pick(*(n for n in range(1, max(channels, 1) + 1) if channels % n == 0))
    if d.likely(0.5):
        film = d.fit((channels, 2), x.dtype)
        weight, bias = f"{film}.unbind(1)[0]", f"{film}.unbind(1)[1]"
    else:
        weight, bias = d.fit((channels,), x.dtype), d.fit((channels,), x.dtype)
    return d.pick(f"F.group_norm({x}, {groups}, {weight}, {bias}, eps=0.1)", f"F.group_norm({x}, {groups}, eps=0.1)")


def batch_norm(d: Draw) -> str:
    x = d.tensor(2, 3, 4)
    channels = (x.shape[1],)
    mean, scale = d.leaf(channels, x.dtype, grad=False), d.leaf(channels, x.dtype, grad=False)
    weight, bias = d.fit(channels, x.dtype), d.fit(channels, x.dtype)
    if not weight.value.is_contiguous() and math.prod(x.shape[2:]) == 1:
        raise Refused("torch's own gradient of rows is wrong then: it reads the weight as if it were contiguous")
    return d.way(BATCH_NORMS).format(x=x, m=mean, v=scale, w=weight, b=bias)


def updating(d: Draw) -> str:
    """A batch norm that writes to its running statistics."""
    x = d.tensor(2, 3)
    mean = d.leaf((x.shape[1],), x.dtype, grad=False)
    scale = d.leaf((x.shape[1],), x.dtype, grad=False)
    return f"F.batch_norm({x}, {mean}, {scale}, training=True, eps=0.1)"


def conv(d: Draw) -> str:
    x = d.tensor(3, 4)
    kernel = [min(n, d.pick(1, 2, 3)) for n in x.shape[2:]]
    weight = d.leaf((d.size(), x.shape[1], *kernel), x.dtype)
    bias = d.pick("None", d.fit(weight.shape[:1], x.dtype))
    options = d.pick("", ", padding=1", ", stride=2", ", padding=1, dilation=2", ", padding='same'")
    return f"F.conv{x.ndim - 2}d({x}, {weight}, {bias}{options})"


def transposed(d: Draw) -> str:
    x = d.tensor(3)
    return f"F.conv_transpose1d({x}, {d.leaf((x.shape[1], d.size(), 2), x.dtype)}, stride={d.pick(1, 2)})"


def pooling(d: Draw) -> str:
    x = apart(d.tensor(3, 4))
    n = x.ndim - 2
    return d.way(f"F.avg_pool{n}d({x}, 2) | F.max_pool{n}d({x}, 2, stride=1) | F.adaptive_avg_pool{n}d({x}, 2)")


def interpolate(d: Draw) -> str:
    x = d.tensor(3, 4)
    way = d.pick("'nearest'", "'linear', align_corners=False" if x.ndim == 3 else "'bilinear', align_corners=True")
    return f"F.interpolate({x}, scale_factor={d.pick(2, 2, 3)}, mode={way})"


def loss(d: Draw) -> str:
    x = d.tensor(1, 2)
    y = d.fit(x.shape, x.dtype)
    off(Var.of("", x.value - y.value), 0.0, 1.0, -1.0)
    how = d.pick("mean", "sum", "none")
    return d.way(LOSSES).format(x=x, y=y, h=how)


def entropy(d: Draw) -> str:
    x = d.tensor(2, 3)
    target = d.index((x.shape[0], *x.shape[2:]), x.shape[1])
    option = d.pick("", ", label_smoothing=0.1", ", reduction='sum'", ", ignore_index=0, reduction='none'")
    weight = d.leaf((x.shape[1],), x.dtype, grad=False)
    return d.way(ENTROPIES).format(x=x, t=target, o=option, w=weight)


CALLS = (
    *(normalised, normalised, normalised, group_norm, group_norm, batch_norm, updating, conv, conv, transposed),
    *(pooling, interpolate, interpolate, loss, loss, entropy, entropy),
)
