"""Bodies written in Pallas: `tpu_*` for TPUs (Mosaic), `gpu_*` for NVIDIA GPUs from Hopper on (Mosaic GPU).

One file for each thing that a chip does: the layout of a page, the write, the attention; and `*_body`, which joins
them to a `PagedAttention`. docs/kernels.md draws the algorithms and says what was proven where.
"""
