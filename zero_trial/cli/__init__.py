"""The command line ``zero-trial`` (alias ``zt``): one file per verb, each a thin front end."""
