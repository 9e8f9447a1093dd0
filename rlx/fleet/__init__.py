"""The inference fleet: the wire, its two ends, the engines behind it, and weight publishing."""

import os

# gRPC reads it when first imported; it would write a line of its own whenever a server goes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
