"""Arguments of a kernel: rules for operands, results, room for partials, and facts about the GPU."""
