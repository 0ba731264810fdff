"""Checkpoints that other tools have quantised: one module per format, all read in one normal form.

    config.json --read_scheme--> Scheme --format_of--> Format of each weight --open--> QuantisedTensor
                                                                                             |
    weight rules ask for a slice of X.weight <--keep or widen-- QuantisedSlice <--read a slice-+

Rules of families go on naming `X.weight`. A format names the tensors that are there in its place, so lists of missing
and unknown names stay exact, and reads any slice of the weight as codes, scales and zeros (`slices`), which is all that
other modules see of it. `storing` says which parameters of the model are kept as codes, `coding` reads those, and
rounds floats to codes; `widening` makes a float tensor of the others. Both work slice by slice.

The element types of GGUF files are read in the same form (`models.gguf.blocks`).

To add a format: a module with a `Format` and a tensor that reads slices, and its name in `reading` or, for one of
compressed-tensors', in `compressed_tensors`. Its test has an oracle that shares no code with it.
"""

from jaxserve.models.quantised.reading import describe_quantisation, read_scheme
from jaxserve.models.quantised.slices import QuantisedSlice, QuantisedTensor
from jaxserve.models.quantised.storing import Kept, Quantisation, choose_kept, configured_quantisation

__all__ = [
    "Kept",
    "Quantisation",
    "QuantisedSlice",
    "QuantisedTensor",
    "choose_kept",
    "configured_quantisation",
    "describe_quantisation",
    "read_scheme",
]
