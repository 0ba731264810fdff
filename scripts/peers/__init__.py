"""The same requests through jaxserve and through other engines, each in an environment of its own.

    compare_peers.py                                  (the environment of jaxserve)
        workloads --asks--> process ==JSON lines==> worker + engine_NAME   (the engine's environment)
        tables, JSON, plot <-- report <-- figures <--answers==

Why it has this shape. No environment holds all engines, and a figure can be compared only when one definition made it.
So an engine's side knows nothing of workloads or rates: it is given token ids and when they are due, and gives back
which tokens it made and when each was there. Every rate, ratio and latency is computed once, on the other side, from
these times. All engines stay loaded while one of them works; the others' processes are stopped, so that none spins.
"""
