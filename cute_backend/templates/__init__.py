"""GEMM kernels that an epilogue plugs into, one file an architecture: loads, MMA, pipelines, hooks."""
