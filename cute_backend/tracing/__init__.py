"""Tracing of functions that are called eagerly: what they depend on, and how a failure stays quiet."""
