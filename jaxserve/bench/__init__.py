"""The load generator: how fast is an endpoint, or an engine in this process, and was it the tool that was slow?

    dataset --shapes--> prompts --samples--> load --arrivals--> client --recordings--> metrics --> table, JSON, plot

Why it has this shape. A figure is worth what its definition is worth, so the definitions stand in `jaxserve.workloads`,
beside the datasets and the arrivals: they take plain times and know neither network nor engine, and a simulation is
judged by them, too. They are those of vLLM's `bench serve`, under its names in the JSON, so that results of both tools
can stand in one plot. Everything random comes from one seed. What is measured on one machine next to a busy client is
easily the client itself, so the generator measures its own lateness all the time, and a result in which that could
matter says so.

`openai_client` and `grpc_client` ask, `load` runs them, `recording` is what they fill, `lag` watches the generator,
`words` learns what the server reads as one token, `report`, `show` and `plot` tell. `offline` and `startup` measure an
engine without a door. Nothing here loads JAX before a model is loaded in this process.
"""
