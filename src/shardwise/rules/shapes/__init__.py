"""Rules of ops that rearrange elements."""

from shardwise.rules.shapes import diagonals, im2col, joining, padding, reshapes, roll_flip_repeat, slice_scatter, views

__all__ = ["diagonals", "im2col", "joining", "padding", "reshapes", "roll_flip_repeat", "slice_scatter", "views"]
