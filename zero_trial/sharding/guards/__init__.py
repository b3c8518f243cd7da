"""Guards that refuse changes of parameters by user code that would make training wrong."""
