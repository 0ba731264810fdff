"""Checkpoints that other tools have quantised: one module per format, all read in one normal form.

    config.json --read_scheme--> Scheme --format_of--> Format of each weight --open--> QuantisedTensor
                                                                                             |
    weight rules ask for a slice of X.weight <--dequantise-- QuantisedSlice <--read a slice--+

Rules of families go on naming `X.weight`. A format names the tensors that are there in its place, so lists of missing
and unknown names stay exact, and reads any slice of the weight as codes, scales and zeros (`slices`), which is all that
other modules see of it. `widening` makes it a float tensor, slice by slice.

The element types of GGUF files are read in the same form (`models.gguf.blocks`).

To add a format: a module with a `Format` and a tensor that reads slices, and its name in `reading` or, for one of
compressed-tensors', in `compressed_tensors`. Its test has an oracle that shares no code with it.
"""

from jaxserve.models.quantised.reading import describe_quantisation, read_scheme
from jaxserve.models.quantised.slices import QuantisedSlice, QuantisedTensor

__all__ = ["QuantisedSlice", "QuantisedTensor", "describe_quantisation", "read_scheme"]
