"""The errors of the mailbox, and the errors of single tries, which its media translate."""

from __future__ import annotations


class MailboxError(OSError):
    """A store of objects refuses a request, or does not answer. The text names address, path, verb and remedy."""


class RoundGone(MailboxError):
    """The messages of a closed round are no longer in the run."""


class Unavailable(MailboxError):
    """A store of objects has not answered before the deadline; it may answer later."""


class Transient(Exception):
    """A try has failed, and a later one may succeed.

    Args:
        reason: the error of the store.
        remedy: the end of the error text, if no later try succeeds.
    """

    def __init__(
        self, reason: object, *, remedy: str = "see whether this machine reaches the store, or give a longer timeout"
    ) -> None:
        super().__init__(str(reason))
        self.remedy = remedy


class Permanent(Transient):
    """A try has failed, and so would any other one."""
