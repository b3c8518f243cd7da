"""The fastest ds_config that fits: candidates, what the plan says of them, short trials."""
