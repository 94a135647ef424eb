"""The local side: the visible tree, the pins that keep closed bytes unchanged, and the changes the mount reports."""
