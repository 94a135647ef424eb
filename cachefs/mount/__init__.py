"""The FUSE side: translates kernel requests into calls on the visible tree in staging, and reports what changed.

kernel.py      kernel passthrough: the extension under pyfuse3, backing ids
inodes.py      nodes and names that the kernel knows
tree.py        what the three parts share: nodes, handles, pins, observer
namespace.py   names: lookup, create, remove, rename, link, list
content.py     bytes: create, open, read, write, sync, release
attributes.py  stat, chmod, chown, times, extended attributes
handles.py     open files
observer.py    what the mount asks of the rest of the daemon
operations.py  the pyfuse3 adapter: translate, call, map errors
session.py     mount, serve, unmount; stale mounts
"""

from cachefs.mount import kernel as kernel  # before anything imports pyfuse3
