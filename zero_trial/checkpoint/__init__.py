"""Checkpoints: safetensors files of slices of logical tensors, and one JSON manifest that is
written last.

A folder is a checkpoint when its manifest verifies; nothing in it depends on how many ranks wrote
it. No pickle.
"""
