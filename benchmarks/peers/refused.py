"""What an engine raises when the column asks for more than it can do."""


class Refused(Exception):
    """The installed engine cannot do what a column asks."""
