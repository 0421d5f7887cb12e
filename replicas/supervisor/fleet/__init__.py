"""The replicas of a run, in the supervisor's process: started, watched, restarted."""
