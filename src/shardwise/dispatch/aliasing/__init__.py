"""What shares memory with what: views, copies in the place of views, and what a write to either reaches."""
