"""The kinds of members that are several nodes: reductions, rotations, concatenations, tiled scales."""
