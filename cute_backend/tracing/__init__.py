"""Tracing of functions that are called eagerly: the values that they depend on, and failures without logs."""
