"""The local side: the visible tree, the pins that keep closed bytes unchanged, and the changes the mount reports.

layout.py    the staging directory and its lock
pins.py      hard links that keep the bytes of a save
copying.py   copies of staged files, by reflink where possible
capacity.py  room for new files
changes.py   what the mount tells about the tree
"""
