"""How the pages of this folder are built: `make docs`. Nothing is fetched, and every warning is an error."""

import cute_backend

project = "cute_backend"
author = "the cute_backend authors"
copyright = author
version = release = cute_backend.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_title = f"cute_backend {version}"

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

nitpick_ignore_regex = [
    (r"py:.*", r"(cutlass|os|torch|collections|rich|sympy|numpy|typing|fx)\b.*"),
    (r"py:.*", r"(Any|Callable|Sequence|Tensor|RenderableType|Path)"),
    (r"py:.*", r"(cute_backend\..*)?(Built|Kernel|EpilogueSpec|Alignment|Reason)"),  # named in types alone
]
