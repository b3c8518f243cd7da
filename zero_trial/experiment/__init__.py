"""The experiment's YAML: ``check``, ``run``, ``plan`` and the master share one set of rules."""
