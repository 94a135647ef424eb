"""The commands. Thin: each reads its arguments, calls one function of the program, and prints.

main.py      the app, errors and exit codes
options.py   options from the configuration's table
mount.py     mount
ask.py       status, wait, close, flush: ask a running daemon
bucket.py    ls, verify, restore: need only the store
retention.py gc, rollback
doctor.py    doctor
policy.py    policy: prints documents, needs nothing
show.py      how results look
"""
