"""Convolutions: batch and channels are free, spatial dims exchange their borders."""
