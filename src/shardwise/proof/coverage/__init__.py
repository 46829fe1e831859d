"""Every operator of torch on DTensors, in all layouts, against plain torch."""
