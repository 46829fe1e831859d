"""Rules of neural networks' ops."""

from shardwise.rules.nn import (
    attention,
    batch_norm,
    convolution,
    embeddings,
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
    "convolution",
    "embeddings",
    "multihead",
    "norms",
    "pooling",
    "recurrent",
    "resampling",
    "softmax",
]
