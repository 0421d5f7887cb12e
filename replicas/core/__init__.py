"""Pure state machines: no I/O, no clock, no torch.

Time comes in as an argument, effects go out as values.
"""
