"""Guards that refuse what user code does to parameters where it would train wrongly."""
