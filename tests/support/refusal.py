"""The check that a call is refused with a message."""

import pytest


def refused(message, call, *arguments, **options):
    """Asserts that the call raises a ValueError whose text matches the regular expression."""
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)
