"""Look-ups and writes by index: gather, index, scatter and their kin, also over a sharded dim."""
