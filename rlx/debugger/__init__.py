"""Debugging an agent against any OpenAI-compatible server: recorder, concurrent runs, findings."""
