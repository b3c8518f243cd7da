"""Side-by-side measurements against peers; results/ holds what they gave, with machine, versions
and command."""
