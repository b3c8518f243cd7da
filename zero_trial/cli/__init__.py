"""The command line ``zero-trial`` (alias ``zt``): one file for each topic, a thin front end."""
