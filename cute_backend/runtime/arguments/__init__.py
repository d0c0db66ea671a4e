"""What a kernel is called with: operands, results, room for partials, and the GPU."""
