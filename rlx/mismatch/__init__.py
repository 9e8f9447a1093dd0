"""The engine against the trainer: scores compared, known mistakes recognised, the run's gate."""
