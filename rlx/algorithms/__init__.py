"""Advantages, losses and presets: arrays in, arrays out."""
