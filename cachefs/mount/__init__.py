"""The FUSE side: translates kernel requests into calls on the visible tree in staging, and reports what changed.

inodes.py      nodes and names that the kernel knows
filesystem.py  the semantics, on directory descriptors; no pyfuse3
handles.py     open files
operations.py  the pyfuse3 adapter: translate, call, map errors
session.py     mount, serve, unmount; stale mounts
"""
