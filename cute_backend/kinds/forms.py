"""All forms of results, and those that have a field of their own in the JSON form of a spec."""

from __future__ import annotations

from cute_backend.kinds.reductions import Reduction
from cute_backend.kinds.results import Cache, Form, Heads, OfBlocks, PartOf, TiledScales, WholePlane

FORMS: dict[str, type[Form]] = {form.field: form for form in (Reduction, PartOf, Heads, Cache)}
"""The forms by these fields. The others are those that `kinds.results.ordered` makes."""

EVERY: tuple[type[Form], ...] = (WholePlane, OfBlocks, TiledScales, *FORMS.values())
