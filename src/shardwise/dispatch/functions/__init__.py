"""Functions that are not computations on shards: metadata, conversions, indexing, lists, what depends on data."""
