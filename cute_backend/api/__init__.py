"""`explain`, `generate` and `build`: questions about a function, and the objects that they return."""

from cute_backend.api.described import ExplainedLoad, ExplainedRegion, ExplainedStore, Product, Source
from cute_backend.api.explanation import Explanation, build, explain, explanation_of, generate

__all__ = [
    "ExplainedLoad",
    "ExplainedRegion",
    "ExplainedStore",
    "Explanation",
    "Product",
    "Source",
    "build",
    "explain",
    "explanation_of",
    "generate",
]
