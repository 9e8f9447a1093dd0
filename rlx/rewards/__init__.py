"""Reward functions, grading, and the pool of processes that runs them."""
