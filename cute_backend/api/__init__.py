"""`explain`, `generate` and `build`: questions about a function, and the objects that they return."""

from cute_backend.api.described import Load, Product, Region, Source, Store
from cute_backend.api.explanation import Explanation, build, explain, explanation_of, generate

__all__ = [
    "Explanation",
    "Load",
    "Product",
    "Region",
    "Source",
    "Store",
    "build",
    "explain",
    "explanation_of",
    "generate",
]
