"""Every stage in plain PyTorch, for every float type and device: the oracle and the fallback."""
