"""Portable kernels in Triton: native head counts and widths, memory linear in the rows."""
