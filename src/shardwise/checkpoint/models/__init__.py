"""A model from and to safetensors files."""
