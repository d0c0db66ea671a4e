"""Functions of kernels: from this process, from disk, or by the compiler in other processes."""
