"""Pooling, resizing and sampling of spatial dims."""
