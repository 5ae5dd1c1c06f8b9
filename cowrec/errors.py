"""The errors that cowrec raises for what its user can mend."""


class UserError(ValueError):
    """A setting, an argument, a file or a model that cowrec cannot work with.

    The message names the problem, the value, the place and the remedy, so the command line prints the message without
    a traceback. Documentation that names ``ValueError`` for an error of cowrec means this class.
    """


class SettingError(UserError):
    """A value of a configuration that cannot be used.

    Attributes:
        keys: what the error is about: keys such as "train.epochs", or a section.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys
