"""The ``tilelang`` backend: kernels of our own in TileLang, compiled at first use."""
