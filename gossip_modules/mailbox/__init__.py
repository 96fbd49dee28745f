"""The mailbox: training over an object store, without an open port, a leader or a server of its own.

`medium` has the stores of objects by address, `sealed` their bytes, `clock` the time. `follow` gives the models of a
run to processes outside; `python -m gossip_modules.mailbox` shows its workers, rounds and costs.
"""

from .follower import FollowedModel, Follower, follow

__all__ = ["FollowedModel", "Follower", "follow"]
