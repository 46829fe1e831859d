"""Running sums, products and extrema along a dim."""
