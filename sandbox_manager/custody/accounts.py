"""Accounts of the manager's own, for the output of jobs that run under an account that is not their owner's.

Jobs of many owners may use such an account (``nobody``, a slot user) one after the other. So the manager gives their
output, and the plugins that send it, to an account that no job has. Each of these accounts has output of one owner at a
time, so the kernel keeps the owners apart.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from sandbox_manager.rules import Account


def choose(
    owner: str, accounts: Sequence[Account], holders: Collection[tuple[int, str]], in_use: Container[int]
) -> Account | None:
    """Return the account that has output of this owner, else a free one; None where there is neither.

    :param holders: uid and owner of all output on the node. :param in_use: uids for which plugins keep state.
    """
    free = None
    for account in accounts:
        owners = {holder for uid, holder in holders if uid == account.uid}
        if owners == {owner}:
            return account
        if free is None and not owners and account.uid not in in_use:
            free = account
    return free
