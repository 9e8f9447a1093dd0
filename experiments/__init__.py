"""Experiments import rlx and are never imported by it."""
