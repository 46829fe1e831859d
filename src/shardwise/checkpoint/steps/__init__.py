"""Steps of training: saved whole or not at all, and resumed from."""
