"""Shards on a storage that fsspec knows: S3, a web server, the hub. What a node needs of them is copied to its disk."""
