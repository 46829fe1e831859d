"""Recurrent layers: the batch is free, time is whole."""
