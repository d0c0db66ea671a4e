"""Shows explanations, builds and results to people and tools: in a terminal and as HTML."""
