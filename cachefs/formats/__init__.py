"""Every byte that cachefs stores, in the bucket or in the journal, is defined here and nowhere else. Pure: no I/O, no
clock.

names.py      file names of any bytes as text, and the check of paths that come from the bucket
keys.py       the bucket tree: builds and parses every key
manifest.py   shards, member report, open, close, manifest, test evidence
pointer.py    the run's control object
records.py    journal records
codec.py      canonical JSON, strict decoding
"""
