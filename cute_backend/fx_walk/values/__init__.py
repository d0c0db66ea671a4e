"""From aten calls and strides to steps and loads of a chain, one value at a time."""
