"""Tracing of functions: finds the values that they depend on, suppresses torch's logs of failures, and adds
shape rules that torch lacks."""
