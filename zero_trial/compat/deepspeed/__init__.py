"""DeepSpeed's modules, answered with names of zero_trial for unchanged scripts."""
