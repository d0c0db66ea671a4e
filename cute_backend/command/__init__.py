"""`python -m cute_backend`: its arguments, its commands and the programs that they are given."""
