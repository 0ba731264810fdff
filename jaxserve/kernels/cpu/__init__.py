"""Kernels for CPUs, in Python: Numba compiles them to machine code for the processor at hand, XLA calls that code.

Why beside XLA's own: XLA:CPU packs no weights ahead of time, and can attend to pages only after copying them
(docs/performance.md, docs/attention-cpu.md). Why Numba: no compiler is needed where jaxserve is installed, and what it
makes follows the processor, as a built wheel could not.

Files: `simd` (products of small blocks, in vector registers), `call` (how XLA calls, and how a call uses all cores),
`scratch` (the memory of a call), `matmul` and `attention` (one kernel each), `target` (what this processor has),
`machine_code` (compiling, keeping, telling XLA), `body` (attention as the package knows it).
"""
