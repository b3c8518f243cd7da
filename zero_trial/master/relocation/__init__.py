"""A folder for the front of PYTHONPATH: its ``sitecustomize`` moves the harness's absolute
paths."""
