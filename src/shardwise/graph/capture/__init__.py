"""What a function does, written down: it runs once without data, and its ops become the parts of a program."""
