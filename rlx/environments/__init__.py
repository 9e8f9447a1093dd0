"""Tools, tasks and environments of other packages, under names of the form `PACKAGE:NAME`."""
