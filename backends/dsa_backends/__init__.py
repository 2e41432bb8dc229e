"""Kernels that ship with dsa-dispatch, one folder per backend."""
