"""Checkpoints that any mesh can read."""
