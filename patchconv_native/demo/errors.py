"""The demo's own error."""


class DemoError(Exception):
    """Something that the user can put right; its text is one line."""
