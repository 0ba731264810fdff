"""LoRA adapters: directories as PEFT writes them, and their weights in the form of a slot of the device.

`peft` reads and checks a directory (`expressions` matches its patterns), `slots` says how a slot of a model lies in
memory, `placing` brings the one into the other. The products are `kernels.low_rank`, the slots of a running engine
`runtime.adapters`.
"""
