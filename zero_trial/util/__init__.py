"""Small shared helpers: text, atomic files, failures, memory, processes."""
