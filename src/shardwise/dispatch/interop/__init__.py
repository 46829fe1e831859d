"""Where torch is met: autograd, hooks, checkpoints, users' functions, entries that bypass dispatch."""
