"""From kernels to callable functions: this process, the disk, or the compiler in other processes."""
