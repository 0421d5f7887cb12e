"""The log pump and its files.

Ranks write into pipes -> the pump folds progress bars -> rotated log files, a tail for
failure reports, and the supervisor's stderr. The shim keeps the pump running; other
rooms read the files (:mod:`replicas.control.log_files`).
"""
