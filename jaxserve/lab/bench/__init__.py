"""The load generator: it measures the speed of an endpoint, or of an engine in this process, and its own lateness.

    dataset --shapes--> prompts --samples--> load --arrivals--> client --recordings--> metrics --> table, JSON, plot

A figure is worth what its definition is worth, so the definitions are in `lab.workloads`, beside the datasets and the
arrivals: they take plain times and know neither network nor engine, and simulations use them, too. They are those of
vLLM's `bench serve`, under its names in the JSON, so that results of both tools can stand in one plot. Everything
random comes from one seed. A measurement beside a busy client on the same machine is easily one of the client itself,
so the generator measures its own lateness all the time, and a result in which that could matter has a warning.

`openai_client` and `grpc_client` send requests, `load` runs them, `recording` has the times of one request, `lag`
watches the generator, `words` finds words that the server reads as one token, `report`, `show` and `plot` present
results, `rates` measures the machine. `offline` and `startup` measure an engine without a door. Nothing here loads JAX
before a model is loaded in this process.
"""
