"""What rules are made of: the types, the registry, notations, and what several families share."""
