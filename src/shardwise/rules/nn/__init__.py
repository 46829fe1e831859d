"""Rules of neural networks' ops."""

from shardwise.rules.nn import (
    attention,
    batch_norm,
    class_losses,
    convolution,
    device_kernels,
    embeddings,
    linear_cross_entropy,
    losses,
    multihead,
    norms,
    pooling,
    recurrent,
    resampling,
    softmax,
)

__all__ = [
    "attention",
    "batch_norm",
    "class_losses",
    "convolution",
    "device_kernels",
    "embeddings",
    "linear_cross_entropy",
    "losses",
    "multihead",
    "norms",
    "pooling",
    "recurrent",
    "resampling",
    "softmax",
]
