"""Facts about a device, read once."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from dsa_dispatch._call import DeviceInfo


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    """What capabilities ask about ``device``. Touches CUDA for a CUDA device only."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            type="cuda",
            name=properties.name,
            compute_capability=(properties.major, properties.minor),
            total_memory=properties.total_memory,
            shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        )
    return DeviceInfo(type=device.type, name=device.type, total_memory=_host_memory())


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        # Not every system tells; then the 1 GiB cap of the default budget decides alone.
        return 1 << 60


def default_budget(device: DeviceInfo) -> int:
    """min(1 GiB, total device memory / 16): never from free memory, which differs between equal ranks."""
    return min(1 << 30, device.total_memory // 16) or 1 << 30
