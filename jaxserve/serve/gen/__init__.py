"""Code written by scripts/gen_proto.py from jaxserve/serve/proto; never edited by hand."""
