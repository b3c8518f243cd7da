"""The experiment's YAML: one set of rules for ``check``, ``run``, ``plan`` and the master."""
