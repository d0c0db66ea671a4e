"""`gemm`: called eagerly. `call` checks a call and remembers its program, which `trace` makes."""
