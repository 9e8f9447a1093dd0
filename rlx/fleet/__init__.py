"""The inference fleet: the wire, its two ends, the engines behind it, and weight publishing."""
