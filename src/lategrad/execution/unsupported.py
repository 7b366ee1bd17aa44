"""How a backend says that it cannot."""


class UnsupportedError(Exception):
    """A backend cannot run this; nothing has been computed, so that another one can take over."""
