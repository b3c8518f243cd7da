"""What surrounds a trial: metrics, checkpoints, preemption, search and the ranks, as small protocols with several
forms.
"""
