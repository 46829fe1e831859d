"""Meshes, where torch's programs import them from."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
