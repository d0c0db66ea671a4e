"""A functional simulator of the part of the PTX machine that this project's kernels use.

It executes a kernel that `cute.compile` made on a CPU, instruction by instruction: the kernel's real PTX and,
on top of it (`host.py`, `simulate.py`), its real host code. The modules, from the caller to the called:

    machine.run_kernel           clusters, CTAs and warps take turns; deadlocks are reported
      ptx_parser.parse           text to instructions with operand objects (syntax.py)
      bound_program.Program      each instruction bound once to a closure, by the table in opcodes.py
        binder.Binder            operands as functions of a warp
        isa/                     the opcodes, one module per family, each with its section of the PTX ISA
      warp.Warp                  32 lanes as numpy vectors, a program counter per lane
      cta.Cta, cta.Cluster       shared memory, tensor memory, barriers, pipes
      asynchrony.Engine          work that completes later, in order per pipe, after seeded random delays
      shadow.Shadow              who wrote and read each cell, and who can know of it: races, missing fences
      global_shadow.GlobalShadow the same for global memory, for all CTAs of a launch
      memory.GlobalMemory        registered host memory; nothing else can be touched
      report.Report              instructions, waits and bytes per warp role; exposed loads; a timeline

The modules by subject:

- A launch: `simulate`, `host`, `linking`, `simulated_gpu`, `machine`, `turns`, `report`, `timeline`.
- The program: `ptx_parser`, `syntax`, `bound_program`, `binder`, `opcodes`, `roles`.
- Warps and CTAs: `warp`, `cta`, `barriers`, `asynchrony`.
- Memory and its order: `memory`, `banks`, `shadow`, `global_shadow`, `lane_accesses`, `scopes`.
- Matrices and tensor maps: `layouts`, `tensormap`, `boxes`, `tensor_cores`, `formats`.
- Errors: `simulation_errors`.

A run proves, for the inputs it ran on:
- The numbers. Integer and data movement instructions are exact. Float instructions round as PTX states.
  Matrix products are formed in double precision and rounded once per instruction into the accumulator.
- That every access stays in memory that is registered or allocated, aligned as PTX wants it.
- That every read of shared and tensor memory is ordered after the write that it depends on, and every
  overwriting after the reads before it, by barriers that the reader or writer waited for; that a
  fence.proxy.async is executed between generic writes and asynchronous accesses; and that the lanes of a warp
  have met at bar.warp.sync before one lane stores or releases data that other lanes wrote or read. These
  checks do not depend on the order of events in the run: they follow from the barriers that each warp waited
  for, not from the time of any access.
  Registers are not checked in this way, except for those of wgmma. Their contents before the first write
  differ from seed to seed, so a read of them shows in the results.
- That any two accesses to a byte of global memory, one of which writes, are ordered, or are both strong, as
  atomic updates are. CTAs of a cluster are ordered by barriers. Clusters are ordered by a release and an
  acquire whose scopes include both; a fence next to a relaxed access counts as one. The other lanes of a warp
  know of what one acquires once they have met it at a barrier.
- That a launch that may overlap the one before it accesses no global memory before griddepcontrol.wait.
- That the kernel ends, with its tensor memory freed, under the delays of the seeds that were tried.

A run can't prove:
- Speed. It counts instructions, not cycles; it has no caches, no issue slots, no bandwidth.
- The work of ptxas: register allocation, spills, its own bugs. The errata of real chips.
- Bits where PTX leaves them open: approximations (ex2.approx, tanh.approx, ...) are closer to the true value
  than the hardware's; the tensor cores' inner sums are not bit-exact beyond what is exactly representable.
- The absence of races between ordinary accesses of the lanes of one warp. An event that one lane waited for
  counts as known to its warp.
- That a kernel leaves counters in global memory as the next launch expects them, unless it is run twice.
- The fences of tensor maps in global memory, and the thread-sync fences of tcgen05, which have no effect
  here.
"""
