"""Faults drawn from a seed: in a simulation of a run, and in real processes."""
