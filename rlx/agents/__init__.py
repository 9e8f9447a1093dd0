"""Agents of any framework: found by name, served by HTTP, recorded as trajectories."""
