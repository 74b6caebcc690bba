"""From a recipe to the parts of a run, each checked before the first rollout."""
