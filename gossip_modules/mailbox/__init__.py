"""The mailbox: training over an object store, without an open port, a leader or a server of its own.

`medium` has the stores of objects by address, `sealed` their bytes, `clock` the time.
"""
