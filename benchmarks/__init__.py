"""Measurements of this project and its peers; results/ has the numbers, with machine, versions and
command."""
