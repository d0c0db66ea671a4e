"""The chain, which is a spec while it grows: steps from aten calls, loads from strides, their checks."""
