"""Linear algebra: batches are free, matrices whole."""
