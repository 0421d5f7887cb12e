"""The config of a run: its schema, its TOML reader, and the diff of a reload."""
