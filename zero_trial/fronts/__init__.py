"""The ways in which one rank of a trial is started, each of which knows platform, trial, mesh and engine at once.

python -m zero_trial.run model_def:MyTrial     rank + local, or rank + cluster
entrypoint: model_def:MyTrial                  rank + cluster, inside Determined's harness
zero_trial.init() and Trainer.fit()            rank + local, or rank + cluster, inside the user's script
"""
