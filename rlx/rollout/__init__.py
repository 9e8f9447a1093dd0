"""From dataset rows to finished groups: admission, workflows, rewards. No JAX, no torch."""
