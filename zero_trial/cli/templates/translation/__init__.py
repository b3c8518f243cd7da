"""An encoder-decoder that translates, as files to copy."""
