"""The process and its machine: messages, forks, other interpreters, files that may be hostile or full."""
