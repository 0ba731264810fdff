"""Kernels: one contract per op, several implementations that keep it, and one choice at start.

An op is a record (`dispatch.Op`): its implementations, which of them is preferred where, its named cases, and how an
implementation is checked. `ops` has those of today: paged attention, products with weights, and grouped products of
experts.

A kernel here is not a function but a promise. `paged_attention` states the arrays, the equation and what an
implementation owes its caller (in place, finite padding, nothing from a neighbour). An implementation is a value that
keeps the promise on some hardware: three functions, and a cache layout that only it knows. The pool of pages, the
models and the scheduler see page ids, never a layout, so keys may be stored transposed, interleaved or in eight bits
without asking anyone.

From this shape follows the rest:
  * XLA's implementation runs everything everywhere. All others are held against a float64 oracle in the tests, and the
    chosen one at each start. Its loops are small ones, for the caches of a CPU; `xla_batched` runs everything too, in
    few large products, for the GPUs and TPUs that the kernels in Pallas do not take.
  * People without an accelerator get machine code for their own processor (`cpu/`): XLA:CPU can neither read pages in
    place nor keep weights in the order in which products read them (`packed_weight`).
  * A weight is a value that can be multiplied with and looked up in (`matmul.Weight`): models ask for no more, and its
    arrays may have any type and lie in any order.
  * `Op.resolve` picks an implementation once, before anything is compiled, and says which and why. One that cannot run
    a use is an error at start; nothing falls back in the middle of a run, or a figure would not say what it measured.
  * `cases` names real batches as data. Tests, benchmarks and the tuner run the same ones, so that a kernel which is
    fast in the benchmark is one that was proven on those very shapes; `oracle` computes the exact result in float64.
  * Sizes of blocks are facts about a device, so they are data too (`tuning`, `tuned/*.json`); each implementation has a
    heuristic for cases that were not measured.
  * A better implementation deletes the old one. Those of other packages join by entry point (`jaxserve.kernels`).

Files: `dispatch` (what an op is), `ops` (the records), `paged_attention` (contract), `xla_attention` with `xla_rows`,
`xla_tiles`, `xla_softmax`, `xla_batched`, `pallas/` (for TPUs and GPUs), `cpu/` (for CPUs), `matmul` (contract),
`xla_matmul`, `packed_weight`, `grouped_matmul` (contract), `xla_grouped_matmul`, `ragged_grouped_matmul` (TPUs),
`packed_experts` (CPUs), `self_check`, `cases`, `oracle`, `tuning`. docs/kernels.md says what was proven where.
"""
