"""Fourier transforms: the transformed dims are whole."""
