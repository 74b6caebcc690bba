"""transformers and PEFT at the edge: loading a model, finding its LM head, packed attention."""
