"""The log pump and its files: from the pipes of ranks to rotated logs."""
