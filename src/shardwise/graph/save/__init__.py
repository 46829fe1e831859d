"""Programs on disk: saved by the names of what they reach, and bound to it again in another process."""
