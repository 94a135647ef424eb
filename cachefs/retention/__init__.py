"""Retention: which generations stay, and how the others are deleted without taking anything from anybody (I14).

plan.py      pure: what stays and why, what may go
view.py      one complete look at a run, or an error
executor.py  one pass: retire, wait for readers, delete, forget
keeper.py    the background task: passes over the runs of this daemon
"""
