"""The ops, and the launch behind each call."""
