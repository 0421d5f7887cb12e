"""The config of a run: its schema, its TOML reader, and the diff of a reload.

TOML file -> text and lines -> tables read into structs, with all problems in one pass
-> checks across tables -> :class:`~replicas.config.structs.Config`. The room reads
files and the environment of the config; it starts nothing and assigns no resources.
"""
