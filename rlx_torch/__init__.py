"""The trainer in PyTorch, of transformers' own models: what `trainer=torch` imports."""
