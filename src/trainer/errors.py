"""The exceptions that carry an exit status; whatever else escapes is a failure of the run (1)."""


class UserError(ValueError):
    """Something the user controls is wrong (exit status 2).

    The message names the field as the user typed it, its value, the rule and the remedy.
    """


class Interrupted(Exception):  # noqa: N818 - an ordered end, not an error
    """The run stopped on a signal after saving a checkpoint (exit status 128 + signum)."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
