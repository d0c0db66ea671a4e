"""Timings of kernels, and what was learnt from them."""
