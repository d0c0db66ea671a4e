"""One kernel: its key, its text, its code, and which kernels a launch can need."""
