"""The load generator: how fast is an endpoint, or an engine in this process, and was it the tool that was slow?

    dataset --shapes--> prompts --samples--> load --arrivals--> client --recordings--> metrics --> table, JSON, plot

Why it has this shape. A figure is worth what its definition is worth, so the definitions stand alone in `metrics`, take
plain times and know neither network nor engine: a list of events written by hand checks them. They are those of vLLM's
`bench serve`, under its names in the JSON, so that results of both tools can stand in one plot. Everything random comes
from one seed. What is measured on one machine next to a busy client is easily the client itself, so the generator
measures its own lateness all the time, and a result in which that could matter says so.

`datasets`, `traces` and `custom` say what is asked, `prompts` spells it, `arrivals` says when, `openai_client` and
`grpc_client` ask, `load` runs them, `metrics` divides, `report`, `show` and `plot` tell. `offline` and `startup`
measure an engine without a door. Nothing here loads JAX before a model is loaded in this process.
"""
