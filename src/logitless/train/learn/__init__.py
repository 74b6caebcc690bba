"""From a scored rollout batch to the next weights: policy, log-probabilities, steps, controllers."""
