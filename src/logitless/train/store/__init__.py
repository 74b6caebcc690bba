"""What lies on disk whole or not at all: checkpoints, tensor files, locks."""
