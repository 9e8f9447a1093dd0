"""The JAX engine: decoding in slots, with programs compiled for a few shapes."""
