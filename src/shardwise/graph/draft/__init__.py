"""A rank's part while passes work on it: its moves, the memory its tensors lie in, and the order of its nodes."""
