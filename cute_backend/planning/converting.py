"""Products that convert a stored weight themselves."""

MOST_CONVERTED_ROWS = 256
"""The most rows of a product whose kernel converts its weight. Each tile of rows converts all of it again,
while another kernel reads and writes it once, and the product reads 16 bits. An estimate puts the crossing at
128 to 256 rows or above; no timing has confirmed it."""
