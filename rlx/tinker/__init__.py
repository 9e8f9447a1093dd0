"""Server of Tinker's API: clients train LoRA adapters of one base model, and sample from them."""
