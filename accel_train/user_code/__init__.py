"""A user's own model, data or loss, named by an option: `FILE.py:NAME` or `package.module:NAME`.

Nothing here imports torch, so that a mistake is found before torch is imported.
"""
