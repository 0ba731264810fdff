"""Simulations of policies, devices and clusters, judged by the metrics of real runs.

    Trace --requests--> simulate, or simulate_cluster --times--> LabResult --> table, data frame, picture
                                  ^
    World: limits of a device, and a cost model: Roofline (published peaks) or Fitted (steps that an engine ran)

The simulated scheduler is the very object that runs on a device, so little has to be imitated: how long a step takes,
and when requests arrive. Each is a value that can be replaced alone. Requests come from the datasets of `jaxserve
bench`, and times are judged by its definitions, so a simulated row and a measured row can stand in one table.

`simulate` runs one engine on a virtual clock, made of `engine` and `values`; `cluster` runs many behind a router.
`arriving` says when requests come, those included that wait for answers. `requests` makes traces, `roofline` and
`fitted` are cost models of steps, `world` puts limits and costs together from a config, `compare` runs several
policies, `results` and `plots` show them. Nothing here loads JAX before the sizes of a model are read from a
checkpoint.
"""
