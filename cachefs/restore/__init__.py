"""From a run's pointer to files. Everything is read by pinned version and verified before it is used.

reader.py    pointer, its history, manifests
shards.py    the bytes of one shard, hashed part by part
verify.py    all shards of a manifest, without writing them anywhere
layout.py    pure: the checks of a manifest's paths
pool.py      bounded threads
files.py     a generation as files in a directory
listing.py   which runs a store holds
"""
