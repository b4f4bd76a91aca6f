"""Files: safetensors, Hugging Face folders, tokenizers, packed checkpoints. This package knows formats and no kernel."""
