"""The calls that programs are made of. Each is drawn as the text of an expression, or a statement."""
