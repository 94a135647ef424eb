"""Flush: pinned files to the store, in parts, resumable, journaled, bounded in memory.

plan.py       pure: what to send next, in which parts, how long to wait
lanes.py      who may use the store now: a global limit of buffers, a back-off for each run
parts.py      reads and hashes one part of a pinned file
shard.py      the upload of one shard
progress.py   what an upload writes into the journal
uploader.py   the Flusher: journal in, shards out
orphans.py    uploads in progress that nobody will finish
loose.py      files outside every generation: overwritable mirrors
"""
