"""The append-only record of what a run did: written by one thread, read to resume and to replay."""
