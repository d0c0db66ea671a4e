"""A functional simulator of the part of the PTX machine that this project's kernels use.

A kernel that `cute.compile` made runs here instruction by instruction on a CPU: its real PTX, and on top of
it (`host.py`, `simulate.py`) its real host code. The way through the code:

    machine.run_kernel           clusters, CTAs and warps take turns; deadlocks are reported
      parser.parse               text to instructions with operand objects (syntax.py)
      program.Program            each instruction bound once to a closure, by the table in opcodes.py
        binder.Binder            operands as functions of a warp
        isa/                     the opcodes, one module per family, each with its section of the PTX ISA
      warp.Warp                  32 lanes as numpy vectors, a program counter per lane
      cta.Cta, cta.Cluster       shared memory, tensor memory, barriers, pipes
      asynchrony.Engine          work that completes later, in order per pipe, after seeded random delays
      shadow.Shadow              who wrote and read each cell, and who can know of it: races, missing fences
      global_shadow.GlobalShadow the same of global memory, for all CTAs of a launch
      memory.GlobalMemory        registered host memory; nothing else can be touched
      report.Report              instructions, waits and bytes per warp role; exposed loads; a timeline

A run proves, for the inputs it ran on:
- The numbers. Integer and data movement instructions are exact. Float instructions round as PTX states.
  Matrix products are formed in double precision and rounded once per instruction into the accumulator.
- That every access stays in memory that is registered or allocated, aligned as PTX wants it.
- That every read of shared and tensor memory is ordered after the write that it depends on, and every
  overwriting after the reads before it, by barriers that the reader or writer waited for; that a
  fence.proxy.async stands between generic writes and asynchronous accesses; and that the lanes of a warp have
  met at bar.warp.sync before some of them store, or let go of, what others wrote or read. This does not
  depend on luck: it follows from what each warp waited for, not from when things happened. Registers are not
  watched in this way but for wgmma's: what they hold before their first write differs from seed to seed.
- That any two accesses to a byte of global memory, one of which writes, are ordered in the same way,
  whichever CTAs make them: by barriers, and between clusters by releases and acquires whose scopes have both,
  which may be fences beside relaxed accesses; or that both are strong, as atomic updates are. And that
  nothing global is touched before griddepcontrol.wait, in a launch that may overlap the one before it.
- That the kernel ends, with its tensor memory freed, under the delays of the seeds that were tried.

A run can't prove:
- Speed. It counts instructions, not cycles; it has no caches, no issue slots, no bandwidth.
- The work of ptxas: register allocation, spills, its own bugs. The errata of real chips.
- Bits where PTX leaves them open: approximations (ex2.approx, tanh.approx, ...) are closer to the true value
  than the hardware's; the tensor cores' inner sums are not bit-exact beyond what is exactly representable.
- The absence of races between ordinary accesses of the lanes of one warp. An event that one lane waited for
  counts as known to its warp.
- That a kernel leaves counters in global memory as the next launch wants them, unless it is run twice; and
  the fences that tensor maps there need.
- The tcgen05 thread-sync fences, which change nothing here.
"""
