"""What ``zero-trial init`` copies: folders that train as they are, for users to change."""
