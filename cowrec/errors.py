"""The error that cowrec raises for what its user can mend."""


class UserError(ValueError):
    """A setting, an argument, a file or a model that cowrec cannot work with.

    The message names the problem, the value, the place and the remedy, so the command line prints the message without
    a traceback. Documentation that names ``ValueError`` for an error of cowrec means this class.
    """
