"""How an experiment's hyperparameters are searched: single, random, grid and adaptive_asha as pure
state machines.
"""
