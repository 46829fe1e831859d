"""What all proofs share: torch's samples, when two tensors are the same, tasks on processes, reports."""
