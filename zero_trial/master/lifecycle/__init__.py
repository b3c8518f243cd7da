"""What happens to trials and experiments, as pure functions: (state, event) -> (state, effects)."""
