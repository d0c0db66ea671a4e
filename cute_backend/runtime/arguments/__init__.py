"""Arguments of a kernel: operands, results, room for partials, and facts about the GPU."""
