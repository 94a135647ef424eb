"""Object stores behind one protocol: S3, a directory, memory; and the probe that finds out what a store honours.

base.py                      the protocol and its rules
open.py, hop.py              from a URL to a store; from async code to a store
counting.py                  the hop that counts a store's answers
s3*.py                       S3 through boto3: requests, answers, bodies, errors
directory.py, file*.py       a directory: keys, records, uploads, files
memory.py                    memory, for tests
createonly.py                create-only writes, and what an unclear answer to one means
probe.py, probechecks.py     the probe, its questions
digests.py, listing.py       what several stores share
"""
