"""Fleets: many replicas of one engine behind one address, run by Ray Serve (extra `ray`).

    client --gRPC--> Ray's proxy --> Ingress --prefix-aware router--> EngineReplica   (an engine and its model)
                                        |                             EngineReplica
                                        +-- lets a request whose replica died go on at another

Ray Serve already starts, counts, watches and replaces processes over a cluster, so nothing of that is written here. It
does not know the protocol of jaxserve, which requests may be sent again, and that two prompts with the same beginning
belong on the same replica: these three are the files of this package. A client notices nothing of it: the messages and
the statuses are those of a single server.

Only the modules named `ray_*` import Ray, and only a Ray Serve config file names them.
"""
