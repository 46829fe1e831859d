"""How a program runs: node by node, compiled, as CUDA graphs, or as one node of a larger graph."""
