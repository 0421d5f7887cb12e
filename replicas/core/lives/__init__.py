"""The life cycle of replicas: states, restarts, budgets and start order."""
