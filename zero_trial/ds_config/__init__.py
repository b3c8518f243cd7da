"""Configuration: ds_config and the experiment YAML, read strictly into frozen dataclasses. Imports no torch."""
