"""What ``zero-trial init`` copies: folders that train as they are, to be changed by whoever asked
for them."""
