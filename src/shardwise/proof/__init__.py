"""Proof by trying: torch's own samples of every operator, run on simulated shards and compared with plain torch."""
