"""A backend for dsa-dispatch in a distribution of its own."""
