"""Gradients on their way through moves: which may be overwritten, which wait, and what a second pass needs."""
