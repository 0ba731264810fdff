"""Draft heads trained on a frozen target: `jaxserve train-draft`, and the demo model's own head.

    prompts --answers--> tokens --batches--> rows --losses--> trainer --saving--> a directory for `speculation.model`

The layers are the engine's own: a head is trained through the modules that will draft with it, and the target is the
decoder as it is loaded to be served, whatever its family. Only attention is another (`attention`): differentiable, over
whole sequences, with a head's keys of earlier guesses beside the true ones.
"""
