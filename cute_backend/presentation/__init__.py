"""Shows explanations, builds and results to people and tools: in a terminal, as HTML, as artifacts."""
