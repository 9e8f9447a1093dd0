"""The inference fleet: the wire, its two ends, the engines behind it, and weight publishing."""

import os

# Read by gRPC when it is first imported. What fails reaches us as an exception and is said once;
# its own log would say it again on the user's terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
