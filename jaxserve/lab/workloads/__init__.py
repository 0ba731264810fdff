"""Requests for an engine, and metrics of its answers: the part that measuring and simulating share.

    datasets --shapes--> arrivals --shapes with times--> prompts --samples--> (an endpoint, or a simulation)
                                                                    outcomes --> metrics --> tables

A simulated figure can stand beside a measured one only when both come from the same requests and the same definitions,
so there is one of each here and none elsewhere. A workload begins as shapes: lengths, times and shared beginnings,
without tokens, since an endpoint needs text, an engine ids, and a simulation of a million requests neither in advance.
Shapes are made one at a time, and everything random comes from one seed.

`datasets` chooses by name; `sessions`, `traces` and `custom` make the datasets that need more than a line. `arrivals`
has the times, `prompts` the contents. `outcome` is the result of a request, `metrics` the figures with their
definitions, `tables` their look, `flags` the options on a command line. Nothing here sends, waits or simulates.
"""
