"""The command line ``zero-trial`` (alias ``zt``): a thin front end with one file per topic."""
