"""One rank of a trial: the platform around it (a folder, a Determined cluster, memory) and the ways
to start it.

python -m zero_trial.run model_def:MyTrial     in a run's folder, or as a task of a cluster
entrypoint: model_def:MyTrial                  inside Determined's harness
zero_trial.init() and Trainer.fit()            inside the user's own script, in a folder or as a
                                               task of a cluster
"""
