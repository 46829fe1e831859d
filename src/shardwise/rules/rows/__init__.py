"""Steps over rows of which each rank has a part, and kernels for them."""

from shardwise.rules.rows import device_kernels

__all__ = ["device_kernels"]
