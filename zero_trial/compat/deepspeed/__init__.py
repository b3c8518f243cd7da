"""DeepSpeed's modules, mapped to zero_trial so that scripts run unchanged."""
