"""What several integrations share; no framework is imported here."""
