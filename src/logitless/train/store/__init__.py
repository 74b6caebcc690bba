"""Files that are written atomically: checkpoints and their tensors; and the lock of a run folder."""
