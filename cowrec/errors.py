"""The errors that cowrec raises for what its user can mend."""


class UserError(ValueError):
    """A setting, an argument, a file or a model that cowrec cannot work with.

    The message names the problem, the value, the place and the remedy. The command line prints it without a traceback.
    Documentation that names ``ValueError`` for an error of cowrec means this class.
    """


class SettingError(UserError):
    """A value of a configuration that cannot be used; ``keys`` are the keys that it is about, or a section."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys
