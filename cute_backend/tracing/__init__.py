"""Tracing of functions that are called eagerly: finds the values that they depend on, and suppresses torch's
logs of failures."""
