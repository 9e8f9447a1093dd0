"""The decoder (Qwen2, Qwen3, Llama), its table of parameters, HF and PEFT files."""
