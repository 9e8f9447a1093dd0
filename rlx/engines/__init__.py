"""The Engine protocol, the server around it, and the engines: JAX and vLLM."""
