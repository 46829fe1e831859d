"""Bytes of files: read and written at given places, checked, and given their names when they are complete."""
