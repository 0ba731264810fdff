"""What is asked of an engine, and how its answers are judged: the part that measuring and simulating share.

    datasets --shapes--> arrivals --shapes with times--> prompts --samples--> (an endpoint, or a simulation)
                                                                    outcomes --> metrics --> tables

Why it has this shape. A simulated figure can stand beside a measured one only when both come from the same requests and
the same definitions, so there is one of each here and none elsewhere. A workload begins as shapes: lengths, times and
what is shared, without tokens, since an endpoint wants text, an engine ids, and a simulation of a million requests
neither before their time. Shapes are made one at a time, and everything random comes from one seed.

`datasets` chooses by name; `sessions`, `traces` and `custom` make what needs more than a line. `arrivals` says when,
`prompts` spells. `outcome` is what became of a request, `metrics` are the figures with their definitions, `tables`
their look, `flags` their options on a command line. Nothing here asks, waits or simulates.
"""
