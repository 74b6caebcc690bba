"""The environments that a recipe can name."""
