"""Values and tables that all other rooms of the core use.

Effects (actions for the engine), the state tables of members, publishes, transfers,
lanes and rounds, manifests of weights, and dtypes.
"""
