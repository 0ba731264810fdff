"""Forms of files that need no JAX: the header of a GGUF file, and a directory that appears as a whole."""
