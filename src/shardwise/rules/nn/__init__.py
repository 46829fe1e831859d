"""Rules of neural networks' ops."""

from shardwise.rules.nn import (
    attention,
    batch_norm,
    class_losses,
    convolution,
    embeddings,
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
    "embeddings",
    "losses",
    "multihead",
    "norms",
    "pooling",
    "recurrent",
    "resampling",
    "softmax",
]
