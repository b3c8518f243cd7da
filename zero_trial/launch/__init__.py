"""Starting ranks on one host or several, and ending all of them together. Imports no torch."""
