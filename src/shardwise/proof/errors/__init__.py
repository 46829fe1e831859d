"""Bad calls: what they raise, against plain torch."""
