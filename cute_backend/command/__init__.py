"""What `python -m cute_backend` does: its arguments, its commands and the programs that they are given."""
