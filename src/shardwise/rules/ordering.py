"""Sorting, order statistics and counting."""
