"""Rules of element-wise ops, reductions, products and linear algebra."""

from shardwise.rules.math import distances, grouped, linalg, matmul, pointwise, random, reductions, scans, spectral

__all__ = ["distances", "grouped", "linalg", "matmul", "pointwise", "random", "reductions", "scans", "spectral"]
