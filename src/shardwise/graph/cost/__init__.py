"""What a program costs: what it communicates and computes, the memory that it takes, and how long that lasts."""
