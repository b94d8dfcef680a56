"""The options in groups, such as `optim`: a dataclass each. `schema.Config` puts them together."""
