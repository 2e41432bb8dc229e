"""The reference in plain PyTorch: every stage, every float type, every device. The oracle and the fallback."""
