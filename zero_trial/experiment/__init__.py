"""The experiment's YAML: one set of rules for ``zero-trial check``, ``run`` and ``plan`` and for
the master.
"""
