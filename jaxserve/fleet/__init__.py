"""Fleets: many replicas of one engine behind one address, run by Ray Serve (extra `ray`).

    client --gRPC--> Ray's proxy --> Ingress --prefix-aware router--> EngineReplica   (an engine and its model)
                                        |                             EngineReplica
                                        +-- sends again what had streamed nothing when its replica died

Why it has this shape. Ray Serve already starts, counts, watches and replaces processes over a cluster, so nothing of
that is written here. What it does not know is our protocol, what may be sent again, and that two prompts with the same
beginning belong on the same replica. Those three are the files of this package. A client needs to know none of it: the
messages, the statuses and the client are those of a single server.

Only the modules named `ray_*` import Ray, and only a Ray Serve config file names them.
"""
