"""Code written by scripts/gen_proto.py from jaxserve/kv/proto; never edited by hand."""
