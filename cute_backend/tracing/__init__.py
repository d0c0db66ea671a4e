"""Tracing of functions: finds the values that they depend on, suppresses torch's logs of failures, adds shape
rules that torch lacks, and lets attention have the ops of a GPU."""
