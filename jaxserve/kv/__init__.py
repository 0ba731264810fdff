"""Pages of keys and values outside the device: stores of bytes, transfers to and from them, and connectors.

    store          `KVStore`, the seam: bytes under keys, an outcome for each; and the registry of stores
    names          keys of pages, the scope of a tenant in them, and names that show nothing
    memory_store, file_store, remote, object_store    where bytes can be
    sealed_store   what the last three share: naming, sealing, deadlines, over a place for `blobs`
    page_format    the bytes of a page with its header and MAC; compression beside it
    guarded        a store that is left alone for a while when it is dead or slow
    transfer       threads that fill slots of host memory from a store, and write behind
    connector      the seven methods of KV connectors, and a reference over a store
    conformance    the tests of any store

A page crosses here as bytes, from or to a *slot* of host memory, and never touches the device: only a plan moves a slot
to a page. So a store that is slow, wrong or gone costs a request what it would have had to compute without it.
"""
