"""When a program serves a call: what the function reaches, what of that the program depends on, and by which names."""
