"""Embeddings and bags of them, with tables split by rows, by columns, or both."""
