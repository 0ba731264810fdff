"""Implementations written in Pallas: `tpu_*` for TPUs (Mosaic), `gpu_*` for NVIDIA Hopper GPUs (Mosaic GPU).

There is a file each for the layout of a page, the write and the attention; and `*_implementation`, which joins them to
a `PagedAttention`. `gpu_grouped_matmul` is the grouped product of experts. docs/kernels.md draws the algorithms and
says what was proven where.
"""
