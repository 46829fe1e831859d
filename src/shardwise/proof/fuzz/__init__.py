"""Random programs: drawn, run on one device and on DTensors, compared, and made small where they differ."""
