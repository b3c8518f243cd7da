"""One run, or a whole sweep, as one HTML page that needs nothing else: read from a folder or the
master's store, drawn by pure functions.
"""
