"""Kernels: one contract per op, several bodies that keep it, and one choice at start.

A kernel here is not a function but a promise. `paged_attention` states the arrays, the equation and what a body owes
its caller (in place, finite padding, nothing from a neighbour). A *body* is a value that keeps the promise on some
hardware: three functions, and a cache layout that only it knows. The pool of pages, the models and the scheduler see
page ids, never a layout, so a body may store keys transposed, interleaved or in eight bits without asking anyone.

From this shape follows the rest:
  * The XLA body runs everything everywhere, and so whatever no other body takes. All bodies are held against a float64
    oracle in the tests, and the one that is chosen, unless it is XLA's, at each start.
  * People without an accelerator get machine code for their own processor (`cpu/`): XLA:CPU can neither read pages in
    place nor keep weights in the order in which products read them (`packed_weight`).
  * `dispatch.resolve` picks a body once, before anything is compiled, and says which and why. A body that cannot run
    a case is an error at start; nothing falls back in the middle of a run, or a figure would not say what it measured.
  * `cases` names real batches as data. Tests, benchmarks and the tuner run the same ones, so that a body which is fast
    in the benchmark is one that was proven on those very shapes; `oracle` says in float64 what is right.
  * Sizes of blocks are facts about a device, so they are data too (`tuning`, `tuned/*.json`); each body has a
    heuristic for what nobody measured.
  * A better body deletes the old one. Bodies of other packages join by entry point (`jaxserve.kernels`).

Files: `paged_attention` (contract), `xla_attention` with `xla_rows`, `xla_tiles`, `xla_softmax` (the XLA body),
`pallas/` (bodies for TPUs and GPUs), `cpu/` (for CPUs), `packed_weight` (products there), `dispatch`, `self_check`,
`cases`, `oracle`, `tuning`. docs/kernels.md says what was proven where.
"""
