"""GGUF files as checkpoints: their metadata as a config, and their tensors under the names that they have there.

    gguf_file --config--> fields of config.json --adapt of a family--> DecoderConfig
        |
        +--tensors--> sources by name --blocks--> QuantisedTensor     rules of `families`: the names in the file

`architectures` is the table of the architectures that are known, `blocks` that of the element types.
"""
