"""Explanations, builds and results as people and tools read them: in a terminal, as HTML, as artifacts."""
