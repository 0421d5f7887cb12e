"""The shim of one node of one replica, and the processes that it starts."""
