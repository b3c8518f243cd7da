"""An experiment's search (single, random, grid, adaptive_asha) as a pure state machine."""
