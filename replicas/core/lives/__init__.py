"""The life of replicas: states, restarts, budgets and order."""
