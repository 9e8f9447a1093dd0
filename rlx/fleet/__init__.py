"""Client side of the inference fleet, the wire, and weight publishing."""

import os

# Read when gRPC is first imported. Its log would repeat what we report as exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
