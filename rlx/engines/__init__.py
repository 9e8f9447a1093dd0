"""The Engine protocol, its two engines (JAX and vLLM), and the server around them."""
