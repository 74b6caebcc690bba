"""The engine that samples with the trained model itself, on its GPU."""
