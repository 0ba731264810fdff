"""Kernels for CPUs, in Python: Numba compiles them to machine code for the processor at hand, XLA calls that code.

They exist beside XLA's own because XLA:CPU packs no weights ahead of time, and can attend to pages only after copying
them (docs/performance.md, docs/attention-cpu.md). Numba needs no compiler where jaxserve is installed, and makes code
for the processor at hand, as a built wheel could not.

Files: `simd` (products of small blocks, in vector registers), `code_runs` and `rounding` (the same for integer codes),
`gating` (gate and up where their product ends), `emit` (the words of LLVM that these are written in), `call` (how XLA
calls, and how a call uses all cores), `code_call` (what products with codes do in a call), `scratch` (the memory of a
call), `matmul`, `matmul_codes`, `grouped_matmul`, `grouped_codes` and `attention` (one kernel each), `target` (the
registers of processors), `machine_code` (compiling, keeping, registering with XLA), `implementation` (of
`paged_attention`).
"""
