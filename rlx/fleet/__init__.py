"""Client side of the inference fleet, the wire, and weight publishing."""

import os

# Read by gRPC when it is first imported. Failures reach us as exceptions; its own log would repeat
# them on the user's terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
