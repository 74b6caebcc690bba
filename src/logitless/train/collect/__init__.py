"""Rollout batches: sampled, scored by the rewards, refilled, evaluated."""
