"""`jaxserve quantize`: a float checkpoint as one of fewer bits, calibrated on a text.

    source     the float weights, layer by layer, in the layout of the decoder
    choice     which scheme each weight has: from the options, and from a budget of bits
    streaming  one layer at a time over all texts; what its products take in is measured on the way
    rounding, gptq, awq, folding    from a float matrix and its inputs to codes and scales
    written    codes and scales as tensors and config of compressed-tensors
    work       the directory of an unfinished job, from which a killed one goes on
    quality    what the rounding costs: divergence, perplexity, right answers
    job        all of it, in order

No more than one layer's floats are in memory: the hidden states of all texts go from layer to layer instead. Layers
take their inputs from the rounded layers before them, so that each makes up for some of the errors so far.

GPTQ and AWQ are array functions of our own. Those of qwix 0.1.8 (`contrib.gptq_core`, `awq_core`) were tried: GPTQ is
right where a group is its block of 128 columns (all codes equal a float64 oracle's), but takes the scales of smaller
groups from weights that its block has already changed, compiles each width of a slice anew (94 s for a first matrix of
64 x 256, and as long again for each new width), and takes no scales that a file rounds. Its AWQ knows the mean
magnitudes of inputs alone, not how they go together, and one matrix alone, where query, key and value share their
inputs.
"""
