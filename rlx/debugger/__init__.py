"""Debugging an agent against any OpenAI- or Anthropic-compatible server."""
