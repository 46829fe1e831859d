"""Ops that move elements about: rolls, flips, diagonals, pads, repeats, windows of a dim."""
